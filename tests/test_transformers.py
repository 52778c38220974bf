"""Models of transformers, small and random, give eager's logits, gradients and tokens."""

import copy
import functools
import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from flashsoftmax.library import ARGUMENTS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as hf  # noqa: E402
from transformers import masking_utils  # noqa: E402

from flashsoftmax.integrations import flash_attn, hub  # noqa: E402
from flashsoftmax.integrations import transformers as integration  # noqa: E402
from flashsoftmax.integrations.transformers import LazyMask, attend, create_mask, register  # noqa: E402

NAME = register()
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENCODER = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
WHISPER = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **MIXED, attn_logit_softcapping=2.0)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SIZES, **MIXED, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE)
    ),
    "bert": lambda: hf.BertModel(hf.BertConfig(**ENCODER, num_attention_heads=2)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **WHISPER,
            vocab_size=64,
            num_mel_bins=8,
            d_model=32,
            max_source_positions=20,
            max_target_positions=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gpt-oss"]

IDS = torch.arange(1, 19).view(2, 9) * 7 % 64
PADDING = {
    "none": torch.ones(2, 9, dtype=torch.long),
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9]),
    "right": torch.tensor([[1] * 9, [1, 1, 1, 1, 1, 1, 0, 0, 0]]),
    "holes": torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 0]]),
}


@functools.cache
def models(name: str):
    """(with eager attention, with ours), of the same weights: large ones, so that attention matters."""
    torch.manual_seed(0)
    eager = MODELS[name]().eval()
    eager.set_attn_implementation("eager")
    for x in eager.parameters():
        torch.nn.init.normal_(x, std=0.3)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(NAME)
    return eager, ours


class Recorded(TorchDispatchMode):
    """The arguments of each call of our operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.flashsoftmax.attention.default:
            self.calls.append(dict(zip(ARGUMENTS["attention"], args, strict=False)))
        return op(*args, **kwargs or {})


def generate(model, padding="none", **options):
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | options
    return model.generate(IDS, attention_mask=PADDING[padding], **settings)


def assert_same_gradients(eager, ours):
    for (name, x), y in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if x.grad is not None:
            assert (y.grad - x.grad).abs().max() <= 1e-4 * x.grad.abs().max(), name


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", DECODERS)
def test_logits(name, padding):
    eager, ours = models(name)
    with torch.no_grad(), Recorded() as recorded:
        expected = eager(IDS, attention_mask=PADDING[padding]).logits
        actual = ours(IDS, attention_mask=PADDING[padding]).logits
    seen = PADDING[padding].bool()
    assert_close(actual[seen], expected[seen], rtol=1e-4, atol=1e-4)
    assert len(recorded.calls) == 2
    masks = [call["attn_mask"] for call in recorded.calls]
    if padding == "holes":  # a row per sequence, not a matrix
        assert all(mask.untyped_storage().nbytes() == 2 * 9 for mask in masks)
    else:
        assert masks == [None, None]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache, padding):
    eager, ours = models(name)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    expected = generate(eager, padding, **options)
    with Recorded() as recorded:
        actual = generate(ours, padding, **options)
    rows = slice(1) if padding == "right" else slice(2)  # the first token of the other is read from padding
    assert torch.equal(actual[rows], expected[rows])
    steps = [call for call in recorded.calls if call["query"].size(2) == 1]
    assert len(steps) == 2 * 7, "one call per layer and token, with one query: the split-KV kernel"
    for call in steps:
        assert padding == "right" or call["attn_mask"] is None
        if cache == "static":
            assert (call["kv_lens"] <= 17).all()


def test_right_padding_costs_no_queries():
    _, ours = models("mistral")
    with torch.no_grad(), Recorded() as recorded:
        ours(IDS, attention_mask=PADDING["right"])
    for call in recorded.calls:
        assert call["q_lens"].tolist() == call["kv_lens"].tolist() == [9, 6]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beam_search(name, options):
    eager, ours = models(name)
    assert torch.equal(generate(ours, "left", **options), generate(eager, "left", **options))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continued_prefill(name, padding):
    """Chunks of a prompt, longer than one token, over a dynamic and over a static cache."""
    eager, ours = models(name)
    mask = PADDING[padding]
    with torch.no_grad():
        expected = eager(IDS, attention_mask=mask).logits
        for cache in (hf.DynamicCache(config=ours.config), hf.StaticCache(config=ours.config, max_cache_len=12)):
            chunks = [(0, 4), (4, 7), (7, 9)]
            parts = [ours(IDS[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in chunks]
            assert_close(torch.cat(parts, 1)[:, 3:], expected[:, 3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decode_after_right_padding(name):
    """The padding then lies between other keys."""
    after = torch.cat((PADDING["right"], torch.ones(2, 2, dtype=torch.long)), 1)
    steps = []
    for model in models(name):
        cache = hf.DynamicCache(config=model.config)
        model(IDS, attention_mask=after[:, :9], cache=cache)
        steps.append([model(IDS[:, :1], attention_mask=after[:, :n], cache=cache).logits for n in (10, 11)])
    assert_close(*steps, rtol=1e-4, atol=1e-4)


def test_static_cache_without_mask():
    """No mask, and a cache longer than the queries: query 0 is at key 0."""
    module = torch.nn.Module()
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    out, _ = attend(module, q, k, k, None)
    expected, _ = attend(module, q, k[:, :, :5], k[:, :, :5], None)
    assert torch.equal(out, expected)
    out, _ = attend(module, q, k, k, None, sliding_window=2)
    window = masking_utils.sliding_window_causal_mask_function(2)
    mask = masking_utils.sdpa_mask(1, 5, 9, mask_function=window, allow_is_causal_skip=False)
    assert_close(out, attend(module, q, k, k, mask)[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_gradients(name):
    labels = IDS.masked_fill(PADDING["left"] == 0, -100)
    labels[:, 3] = -100  # predicted from a row of padding
    for model in models(name):
        model.zero_grad()
        model(IDS, attention_mask=PADDING["left"], labels=labels).loss.backward()
    assert_same_gradients(*models(name))


def test_gradient_checkpointing():
    _, ours = models("mistral")
    grads = []
    for enable in (False, True):
        ours.zero_grad()
        if enable:
            ours.activation_checkpointing_enable()
        ours.train()
        ours(IDS, attention_mask=PADDING["left"], labels=IDS, use_cache=False).loss.backward()
        grads.append(ours.model.embed_tokens.weight.grad.clone())
    ours.activation_checkpointing_disable()
    ours.eval()
    assert_close(*grads)


def test_bfloat16():
    eager, ours = (copy.deepcopy(x).bfloat16() for x in models("llama"))
    exact = models("llama")[0](IDS, attention_mask=PADDING["left"]).logits[:, 3:]
    expected, actual = (x(IDS, attention_mask=PADDING["left"]).logits[:, 3:] for x in (eager, ours))
    assert actual.dtype == torch.bfloat16
    assert (actual - exact).abs().max() < 2 * (expected - exact).abs().max()


def test_packed_sequences():
    """Padding-free: positions that restart, or cu_seq_lens, keep sequences apart."""
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5, 6]])
    cu = torch.tensor([0, 2, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    for name in ("llama", "mistral"):
        eager, ours = models(name)
        expected = eager(IDS[:1], position_ids=positions, use_cache=False).logits
        for options in ({}, lengths, {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}):
            with Recorded() as recorded:
                actual = ours(IDS[:1], position_ids=positions, use_cache=False, **options).logits
            assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert all(call["cu_seqlens_q"].tolist() == [0, 2, 9] for call in recorded.calls)
    rows = ours(IDS, position_ids=positions.expand(2, -1), use_cache=False).logits
    assert_close(rows, eager(IDS, position_ids=positions.expand(2, -1), use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_encoder():
    eager, ours = models("bert")
    with Recorded() as recorded:
        for padding in ("none", "right", "holes"):
            expected, actual = (x(IDS, attention_mask=PADDING[padding]).last_hidden_state for x in (eager, ours))
            assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert recorded.calls[2]["kv_lens"].tolist() == [9, 6] and recorded.calls[2]["attn_mask"] is None


def test_position_bias():
    """T5: a learned bias beside padding, in encoder, decoder and between them; its gradient; generation."""
    pair = models("t5")
    inputs = {"attention_mask": PADDING["right"], "decoder_input_ids": IDS[:, :5]}
    expected, actual = (x(IDS, **inputs).logits for x in pair)
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for x, logits in zip(pair, (expected, actual), strict=True):
        x.zero_grad()
        logits.square().sum().backward()
    assert_same_gradients(*pair)
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        assert torch.equal(*(generate(x, "right", max_new_tokens=4, min_new_tokens=4, **options) for x in pair))


def test_whisper():
    features = torch.randn(2, 8, 40)
    expected, actual = (x(features, decoder_input_ids=IDS[:, :5]).logits for x in models("whisper"))
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_compiled_model():
    eager, ours = models("llama")
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for mask in (None, PADDING["right"]):
            expected, actual = (x(IDS, attention_mask=mask, use_cache=False).logits for x in (eager, compiled))
            seen = PADDING["right"].bool()
            assert_close(actual[seen], expected[seen], rtol=1e-4, atol=1e-4)


def test_compiled_generation():
    """Decode steps over a static cache are one graph, which a LazyMask enters as an input."""
    eager, ours = models("mistral")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_config = hf.CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    compile_config._compile_all_devices = True
    options = {"cache_implementation": "static"}
    expected = generate(eager, "left", **options)
    assert torch.equal(generate(ours, "left", **options, compile_config=compile_config), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "the first step of a full window is another"


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (hf.BloomForCausalLM, hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)),
        (hf.MptForCausalLM, hf.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2)),
    ],
    ids=["bloom", "mpt"],
)
def test_models_without_interface_are_refused(model, config):
    with pytest.raises(ValueError, match="_supports_attention_backend is False"):
        model._from_config(config, attn_implementation=NAME)(IDS)


def test_refusals():
    _, ours = models("llama")
    with pytest.raises(ValueError, match="output_attentions: True"):
        ours(IDS, output_attentions=True)
    for name in ("flashsoftmax", "my_sdpa", "org/softmax"):
        with pytest.raises(ValueError, match="wanted one without"):
            register(name)
    assert register("other_softmax") == "other_softmax"


WINDOW = masking_utils.sliding_window_causal_mask_function(4)
BOTH_WAYS = masking_utils.sliding_window_bidirectional_mask_function(2)
FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": WINDOW,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "both-ways": BOTH_WAYS,
}
SHAPES = [
    (9, 9, 0, 0),
    (8, 9, 0, 0),
    (1, 9, 8, 0),
    (3, 9, 6, 0),
    (4, 9, 0, 0),
    (2, 9, 3, 0),
    (1, 5, 8, 4),
    (2, 6, 7, 3),
]
"""q_length, kv_length, q_offset, kv_offset."""


@pytest.mark.parametrize("padding", [None, *PADDING])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mask(function, shape, padding):
    """What a LazyMask writes is what transformers writes, and both have the same attention."""
    q_length, kv_length, q_offset, kv_offset = shape
    if "causal" not in function and function != "window" and q_offset + q_length > kv_offset + kv_length:
        pytest.skip("no such queries")
    visible = None if padding is None else PADDING[padding].bool()
    arguments = (2, q_length, kv_length, q_offset, kv_offset, FUNCTIONS[function], visible)
    expected = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False)
    rows = torch.ones(2, q_length, dtype=torch.bool)
    if visible is not None and function in ("causal", "window"):
        rows = visible[:, q_offset : q_offset + q_length]
    q, k = torch.randn(2, 2, q_length, 8), torch.randn(2, 2, kv_length, 8)
    module = torch.nn.Module()
    offsets = [q_offset] if function == "both-ways" else [q_offset, torch.tensor([q_offset])]
    for offset in offsets:
        mask = create_mask(2, q_length, kv_length, offset, *arguments[4:], allow_is_causal_skip=False)
        assert isinstance(mask, LazyMask) and mask.shape == expected.shape
        assert torch.equal(mask.dense()[:, 0][rows], expected[:, 0][rows])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual, _ = attend(module, q, k, k, mask)
        assert_close(actual[rows], attend(module, q, k, k, expected)[0][rows])


def test_dropout_is_passed_on(monkeypatch):
    q, seen = torch.randn(1, 2, 5, 8), []
    monkeypatch.setattr(integration, "attention", lambda query, *_, **options: seen.append(options) or query)
    attend(torch.nn.Module(), q, q, q, None)
    attend(torch.nn.Module(), q, q, q, None, dropout=0.25)
    assert [options.get("dropout_p") for options in seen] == [None, 0.25]


def test_mask_that_is_touched():
    """Operations see the dense mask. What they write counts."""
    arguments = (2, 3, 9, 6, 0, WINDOW, PADDING["left"].bool())
    mask = create_mask(*arguments)
    expected = masking_utils.sdpa_mask(*arguments)
    for same in (mask.contiguous(), mask.to("cpu"), mask.detach(), mask.clone(), copy.copy(mask)):
        assert isinstance(same, LazyMask) and torch.equal(same.dense(), expected)
    assert torch.equal(mask[:, :, :, :5], expected[:, :, :, :5])
    assert torch.equal(~mask, ~expected) and torch.equal(mask & expected, expected)
    assert type(mask + 0) is torch.Tensor
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 9, 8)
    mask[:, :, :, 7] = False
    expected[:, :, :, 7] = False
    module = torch.nn.Module()
    assert_close(attend(module, q, k, k, mask), attend(module, q, k, k, expected))
    assert torch.equal(mask.clone(), expected)


def test_masks_that_no_options_say():
    """Other patterns are dense, and a caller's own mask, bool or float, is taken as it is."""
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    either = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    restarted = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, torch.arange(9).expand(2, 9) % 5
    )
    for function in (chunked, either, restarted):
        mask = create_mask(2, 9, 9, 0, 0, function, None, allow_is_causal_skip=False)
        assert type(mask) is torch.Tensor and mask.dtype == torch.bool
    q, k, bias = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(1, 2, 9, 9)
    visible = torch.rand(2, 1, 9, 9) < 0.5
    floating = torch.zeros(2, 1, 9, 9).masked_fill(~visible, -torch.inf)
    scores = (q @ k.mT / 8**0.5 + bias).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ k).transpose(1, 2)
    for mask in (visible, floating):
        assert_close(attend(torch.nn.Module(), q, k, k, mask, position_bias=bias)[0], expected)


def test_hub_directory(tmp_path):
    """Its modules hand out the installed functions."""
    for path in hub.write(tmp_path):
        metadata = json.loads((path / "metadata.json").read_text())
        assert path.name == f"torch-{metadata['backend']['type']}"
        module = runpy.run_path(str(path / "__init__.py"))
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            assert module[name] is getattr(flash_attn, name) and name in module["__all__"]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_hub_kernel(name, tmp_path_factory, monkeypatch):
    """transformers loads the directory through the kernels library, and calls FlashAttention's functions."""
    if not hf.utils.is_kernels_available():
        pytest.skip("transformers finds no kernels library of a version that it takes")
    hub.write(directory := tmp_path_factory.mktemp("hub"))
    kernel = f"flashsoftmax/{directory.name}"
    monkeypatch.setenv("LOCAL_KERNELS", f"{kernel}={directory}")
    eager, ours = models(name)[0], copy.deepcopy(models(name)[0])
    ours.set_attn_implementation(kernel, allow_all_kernels=True)
    assert torch.equal(generate(ours, "left"), generate(eager, "left"))
    cu = torch.tensor([0, 2, 9], dtype=torch.int32)
    inputs = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5, 6]]), "use_cache": False}
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    expected, actual = eager(IDS[:1], **inputs).logits, ours(IDS[:1], **inputs, **lengths).logits
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_example(cache, monkeypatch, capsys):
    options = {"layers": 1, "hidden": 32, "prompt": 20, "new-tokens": 4, "runs": 1, "dtype": "float32", "cache": cache}
    monkeypatch.setattr("sys.argv", ["generate.py", *(f"--{name}={value}" for name, value in options.items())])
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "generate.py"), run_name="__main__")
    assert "4 of 4 new tokens are the same" in capsys.readouterr().out
