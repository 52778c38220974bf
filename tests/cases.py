"""The inputs that every kernel is held to. A case says what it is about in its id; the rest is kept small.

`Case.inputs` makes the arguments of flashsoftmax.attention (and of reference.attention, but for split_size).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from checks import is_real

NAN = float("nan")


def stored(x: Tensor, size: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> Tensor:
    """x's values in a part, chosen by `view`, of a buffer that is NaN elsewhere."""
    buffer = torch.full(size, NAN if x.is_floating_point() else 1, dtype=x.dtype, device=x.device)
    view(buffer).copy_(x)
    return view(buffer)


def stored_at(offset: int) -> Callable[[Tensor], Tensor]:
    return lambda x: stored(x, (x.numel() + offset,), lambda buffer: buffer[offset:].view(x.shape))


# The same values, stored in other ways. Each takes a contiguous [batch, heads, rows, dim].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "offset-1": stored_at(1),
    "offset-2": stored_at(2),
    "offset-3": stored_at(3),
    "heads-in-rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows-outermost": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "dim-not-last": lambda x: x.mT.contiguous().mT,
    "every-other-element": lambda x: stored(x, (*x.shape[:3], 2 * x.shape[3]), lambda b: b[..., ::2]),
    "every-third-row": lambda x: stored(x, (*x.shape[:2], 3 * x.shape[2], x.shape[3]), lambda b: b[:, :, 1::3]),
    "padded-rows": lambda x: stored(x, (*x.shape[:3], x.shape[3] + 3), lambda b: b[..., 1:-2]),
    "one-of-qkv": lambda x: stored(
        x, (x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]), lambda b: b[:, :, 1].transpose(1, 2)
    ),
    "odd-strides-of-size-1": lambda x: x.as_strided(
        x.shape, [stride if size > 1 else 7 for size, stride in zip(x.shape, x.stride(), strict=True)]
    ),
}


@dataclass(frozen=True)
class Case:
    id: str
    batch: int = 1
    heads: tuple[int, int] = (2, 2)  # of queries, of keys
    rows: int = 40
    keys: int = 72
    dim: int = 64
    value_dim: int | None = None  # None: dim
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool | str = False  # "per-sequence": slopes [batch, heads]
    sinks: bool = False
    mask: str | None = None  # see MASKS
    bias: str | None = None  # attn_bias; a float one of MASKS
    q_offset: int | None = None
    kv_lens: tuple[int, ...] | None = None  # what lies beyond is NaN
    kv_starts: tuple[int, ...] | None = None  # what lies before is NaN
    q_lens: tuple[int, ...] | None = None  # what lies beyond is NaN
    split_size: int | None = None
    dropout_p: float = 0.0
    layout: str = "contiguous"  # of query, key and value; see LAYOUTS
    scores: str = "random"  # see SCORES

    def inputs(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict:
        (query_heads, key_heads), value_dim = (
            self.heads,
            self.dim if self.value_dim is None else self.value_dim,
        )
        query = torch.randn(self.batch, query_heads, self.rows, self.dim)
        key = torch.randn(self.batch, key_heads, self.keys, self.dim)
        value = torch.randn(self.batch, key_heads, self.keys, value_dim)
        SCORES[self.scores](query, key)
        options = {"causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap}
        options |= {"q_offset": self.q_offset}
        tensors = {"query": query, "key": key, "value": value}
        if self.mask:
            tensors["attn_mask"] = MASKS[self.mask](self.batch, query_heads, self.rows, self.keys)
        if self.bias:
            tensors["attn_bias"] = MASKS[self.bias](self.batch, query_heads, self.rows, self.keys)
        if self.alibi:
            tensors["alibi_slopes"] = 2.0 ** -torch.arange(1, query_heads + 1)
        if self.alibi == "per-sequence":
            tensors["alibi_slopes"] = tensors["alibi_slopes"] * torch.rand(self.batch, 1)
        if self.sinks:
            tensors["sinks"] = torch.randn(query_heads)
        if self.kv_lens:
            tensors["kv_lens"] = torch.tensor(self.kv_lens)
        if self.kv_starts:
            tensors["kv_starts"] = torch.tensor(self.kv_starts)
        if self.q_lens:
            tensors["q_lens"] = torch.tensor(self.q_lens)
            for sequence, length in zip(query, self.q_lens, strict=True):
                sequence[:, length:] = NAN
        for b, (start, end) in enumerate(self.filled()):
            padded = [key, value]
            for mask in (tensors.get("attn_mask"), tensors.get("attn_bias")):
                if is_real(mask) and mask.dim() == 4 and mask.shape[0] == self.batch:
                    padded.append(mask.transpose(2, 3))
            for x in padded:
                x[b, :, :start] = x[b, :, end:] = NAN
        if self.dropout_p:
            options["dropout_p"] = self.dropout_p
            tensors["dropout_seed"] = torch.tensor([-(2**62) - 12345, 2**40 + 5])
        tensors = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()}
        tensors |= {name: LAYOUTS[self.layout](tensors[name]) for name in ("query", "key", "value")}
        return tensors | options

    def filled(self) -> list[tuple[int, int]]:
        """The keys [start, end) of each sequence that exist."""
        starts, ends = self.kv_starts or (0,) * self.batch, self.kv_lens or (self.keys,) * self.batch
        return list(zip(starts, ends, strict=True))

    def call(self, attention: Callable) -> Callable:
        return lambda **inputs: attention(**inputs, split_size=self.split_size, return_lse=True)


def bias_keys(bias: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """Gives key j about the score bias(j / keys) over all queries."""

    def apply(query: Tensor, key: Tensor) -> None:
        query[..., 0] = 1
        key[..., 0] = bias(torch.arange(key.shape[2]) / key.shape[2]) * key.shape[3] ** 0.5

    return apply


SCORES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "random": lambda query, key: None,
    "large": lambda query, key: (query.mul_(5), key.mul_(5)),
    "rising": bias_keys(lambda at: 60 * at),
    "falling": bias_keys(lambda at: -60 * at),
    "peak-first": bias_keys(lambda at: 30.0 * (at == 0)),
    "peak-middle": bias_keys(lambda at: 30.0 * (at == 0.5)),
    "peak-last": bias_keys(lambda at: 30.0 * (at == at[-1:])),
    "all-at-minus-300": bias_keys(lambda at: torch.full_like(at, -300)),
    "all-at-plus-300": bias_keys(lambda at: torch.full_like(at, 300)),
}


def hides_blocks(*shape: int) -> Tensor:
    """A bool mask that also hides leading tiles whole, and every key of a middle row and of the last."""
    mask = torch.rand(shape) < 0.7
    mask[..., : shape[-2] // 3, : 2 * shape[-1] // 3] = False
    mask[..., shape[-2] // 2, :] = False
    mask[..., -1, :] = False
    return mask


MASKS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "bool": lambda b, h, m, n: hides_blocks(b, h, m, n),
    "bool-2d": lambda b, h, m, n: hides_blocks(m, n),
    "bool-heads": lambda b, h, m, n: hides_blocks(1, h, m, n),
    "bool-keys": lambda b, h, m, n: torch.rand(b, 1, 1, n) < 0.6,
    "bool-keys-expanded": lambda b, h, m, n: (torch.rand(b, 1, 1, n) < 0.6).expand(b, h, m, n),
    "bool-rows": lambda b, h, m, n: torch.rand(b, 1, m, 1) < 0.6,
    "bool-all": lambda b, h, m, n: torch.ones(1, 1, 1, n, dtype=torch.bool).expand(b, h, m, n),
    "bool-transposed": lambda b, h, m, n: hides_blocks(h, n, m).mT,
    "float": lambda b, h, m, n: torch.randn(b, h, m, n),
    "float-heads": lambda b, h, m, n: torch.randn(1, h, m, n),
    "float-2d": lambda b, h, m, n: torch.randn(m, n),
    "float-3d": lambda b, h, m, n: torch.randn(h, m, 1),
    "float-keys": lambda b, h, m, n: 3 * torch.randn(b, 1, 1, n),
    "float-scalar": lambda b, h, m, n: torch.randn(1, 1),
    "float-hides": lambda b, h, m, n: torch.randn(b, 1, m, n).masked_fill(~hides_blocks(b, 1, m, n), -torch.inf),
}

CASES = [
    # Lengths and head dims, on both sides of every tile there may be.
    Case("1x1", batch=8, heads=(4, 4), rows=1, keys=1),
    Case("9x9-dim-63", rows=9, keys=9, dim=63),
    Case("12x12-dim-72", rows=12, keys=12, dim=72),
    Case("63x63-dim-80", rows=63, keys=63, dim=80, causal=True),
    Case("65x65-dim-96", rows=65, keys=65, dim=96, causal=True),
    Case("127x127-dim-128", rows=127, keys=127, dim=128, causal=True),
    Case("129x129-dim-32", rows=129, keys=129, dim=32, causal=True),
    Case("64x64-dim-256", rows=64, keys=64, dim=256, causal=True),
    Case("17x1", batch=2, heads=(4, 4), rows=17, keys=1),
    Case("1x65", rows=1, keys=65),
    Case("65x12-dim-1", rows=65, keys=12, dim=1),
    Case("129x63-dim-7", rows=129, keys=63, dim=7),
    Case("33x700-dim-8", rows=33, keys=700, dim=8, heads=(1, 1)),
    Case("dim-64-value-dim-128", dim=64, value_dim=128),
    Case("dim-128-value-dim-64", dim=128, value_dim=64, causal=True),
    Case("dim-192-value-dim-128", heads=(4, 1), dim=192, value_dim=128, causal=True),
    Case("dim-1-value-dim-256", dim=1, value_dim=256),
    Case("dim-72-value-dim-5", dim=72, value_dim=5, heads=(6, 2)),
    # Heads.
    Case("heads-6-2", batch=2, heads=(6, 2)),
    Case("heads-5-1-causal", batch=2, heads=(5, 1), causal=True),
    Case("heads-12-2-group-6", heads=(12, 2), dim=16),
    Case("heads-7-1", heads=(7, 1), dim=16, causal=True),
    Case("heads-12-1", heads=(12, 1), dim=16),
    Case("heads-14-2-group-7-one-row", heads=(14, 2), rows=1, keys=200),
    # Which keys a row sees.
    Case("causal-more-rows-than-keys", rows=100, keys=70, causal=True),
    Case("causal-one-more-row-than-keys", rows=66, keys=65, causal=True),
    Case("causal-offset-0", rows=40, keys=90, causal=True, q_offset=0),
    Case("causal-offset-negative", rows=80, keys=90, causal=True, q_offset=-20),
    Case("causal-offset-beyond-all-keys", rows=20, keys=30, causal=True, q_offset=500),
    Case("window-8-0", rows=150, keys=150, dim=16, window=(8, 0)),
    Case("window-64-0-first-tiles-hidden", rows=40, keys=300, dim=16, window=(64, 0)),
    Case("window-0-0", rows=70, keys=70, window=(0, 0)),
    Case("window-0-none", rows=33, keys=70, window=(0, None)),
    Case("window-none-0", rows=33, keys=70, window=(None, 0)),
    Case("window-none-3", rows=70, keys=70, window=(None, 3)),
    Case("window-5-7-more-rows-than-keys", rows=100, keys=60, window=(5, 7)),
    Case("window-none-none", window=(None, None)),
    Case("window-3-none-causal", rows=70, keys=70, window=(3, None), causal=True),
    Case("window-wider-than-all", rows=20, keys=30, window=(2**31, 2**31)),
    Case("window-beyond-all-keys", rows=20, keys=30, window=(4, 4), q_offset=100),
    Case("lengths", batch=5, keys=70, kv_lens=(0, 1, 33, 65, 70)),
    Case("lengths-causal", batch=5, heads=(4, 2), rows=40, keys=70, causal=True, kv_lens=(70, 0, 39, 41, 1)),
    Case("lengths-window-offset", batch=3, rows=20, keys=90, window=(30, 2), q_offset=40, kv_lens=(90, 45, 30)),
    Case("starts", batch=4, heads=(4, 2), rows=40, keys=140, kv_starts=(0, 1, 70, 133)),
    Case("starts-causal", batch=4, rows=70, keys=90, causal=True, kv_starts=(0, 33, 64, 90), sinks=True),
    Case(
        "starts-lengths-window",
        batch=4,
        rows=20,
        keys=300,
        dim=16,
        window=(70, 2),
        kv_starts=(3, 200, 17, 250),
        kv_lens=(300, 260, 16, 300),
    ),
    Case("starts-mask-bool", batch=2, rows=40, keys=140, mask="bool", kv_starts=(5, 60)),
    Case("starts-mask-float-alibi", batch=2, mask="float", alibi=True, kv_starts=(9, 40), kv_lens=(70, 66)),
    Case("starts-mask-float-2d", batch=3, rows=70, keys=300, dim=16, mask="float-2d", kv_starts=(0, 129, 40)),
    Case("starts-mask-float-keys", batch=2, rows=20, keys=200, dim=16, mask="float-keys", kv_starts=(100, 3)),
    Case("query-lengths", batch=4, heads=(4, 2), rows=70, q_lens=(0, 1, 65, 70), sinks=True),
    Case("right-padded", batch=4, rows=70, keys=70, causal=True, q_lens=(0, 5, 66, 70), kv_lens=(0, 5, 66, 70)),
    Case(
        "query-lengths-cache",
        batch=3,
        heads=(4, 2),
        rows=40,
        keys=200,
        dim=16,
        window=(60, 0),
        alibi=True,
        q_lens=(40, 17, 3),
        kv_lens=(200, 90, 60),
        kv_starts=(0, 70, 9),
    ),
    Case("query-lengths-mask", batch=2, rows=40, mask="float", q_lens=(33, 7), sinks=True),
    Case("query-lengths-bias", batch=2, heads=(1, 1), rows=150, keys=200, dim=8, bias="float-2d", q_lens=(3, 150)),
    # Masks.
    Case("mask-bool", batch=2, mask="bool"),
    Case("mask-bool-2d", batch=2, rows=130, keys=140, dim=16, mask="bool-2d"),
    Case("mask-bool-heads-gqa", batch=2, heads=(4, 2), mask="bool-heads"),
    Case("mask-bool-keys-causal", batch=2, mask="bool-keys", causal=True),
    Case("mask-bool-keys-expanded", batch=2, mask="bool-keys-expanded"),
    Case("mask-bool-rows", batch=2, mask="bool-rows"),
    Case("mask-bool-transposed", mask="bool-transposed"),
    Case("mask-float", batch=2, mask="float"),
    Case("mask-float-2d", batch=2, heads=(4, 2), mask="float-2d", causal=True),
    Case("mask-float-3d", batch=2, mask="float-3d"),
    Case("mask-float-keys", batch=2, mask="float-keys"),
    Case("mask-float-scalar", batch=2, mask="float-scalar"),
    Case("mask-float-hides", batch=2, rows=70, keys=140, mask="float-hides"),
    Case("bias", batch=2, bias="float-heads"),
    Case("bias-mask-bool", batch=3, heads=(4, 2), mask="bool-keys", bias="float-heads", causal=True),
    Case("bias-hides-mask-bool", batch=2, rows=70, keys=140, mask="bool-heads", bias="float-hides", softcap=3.0),
    Case("bias-scalar-mask-rows", mask="bool-rows", bias="float-scalar", alibi=True, sinks=True),
    # Scores.
    Case("scale-1", dim=16, scale=1.0),
    Case("scale-negative", scale=-0.2, causal=True),
    Case("scale-0", scale=0.0),
    Case("softcap", softcap=2.0),
    Case("softcap-mask-bool", softcap=1.5, mask="bool", causal=True),
    Case("softcap-mask-float", softcap=1.5, mask="float"),
    Case("softcap-scores-large", softcap=20.0, scores="large"),
    Case("alibi", heads=(4, 2), alibi=True),
    Case("alibi-per-sequence", batch=3, heads=(4, 2), alibi="per-sequence", causal=True),
    Case("alibi-causal-offset", heads=(4, 4), alibi=True, causal=True, q_offset=7),
    Case("alibi-lengths", batch=3, heads=(3, 1), alibi=True, kv_lens=(72, 40, 3)),
    Case("sinks", batch=2, heads=(4, 2), sinks=True),
    Case("sinks-causal-more-rows-than-keys", rows=70, keys=40, sinks=True, causal=True),
    Case("sinks-mask-lengths", batch=3, sinks=True, mask="bool", kv_lens=(72, 0, 30)),
    Case("scores-large", rows=70, keys=300, scores="large"),
    Case("scores-rising", rows=33, keys=400, dim=16, scores="rising"),
    Case("scores-falling", rows=33, keys=400, dim=16, scores="falling"),
    Case("scores-peak-first", rows=33, keys=400, dim=16, scores="peak-first"),
    Case("scores-peak-middle", rows=33, keys=400, dim=16, scores="peak-middle"),
    Case("scores-peak-last", rows=33, keys=400, dim=16, scores="peak-last"),
    Case("scores-at-minus-300", rows=70, keys=200, dim=16, causal=True, scores="all-at-minus-300"),
    Case("scores-at-plus-300", rows=70, keys=200, dim=16, scores="all-at-plus-300"),
    Case("scores-at-minus-300-sinks", rows=20, keys=70, dim=16, sinks=True, scores="all-at-minus-300"),
    # Few rows: keys are split, partial states are merged. A kernel may round a split up to its tile of keys.
    Case("decode-1", batch=2, heads=(8, 2), rows=1, keys=1000, dim=16),
    Case("decode-1-dim-128", batch=2, heads=(2, 1), rows=1, keys=513, dim=128, split_size=128),
    Case("decode-2-dim-72", heads=(2, 1), rows=2, keys=600, dim=72, value_dim=40, split_size=64),
    Case("decode-5-causal", heads=(4, 2), rows=5, keys=700, dim=32, causal=True, split_size=256),
    Case("decode-16-causal", rows=16, keys=513, dim=32, causal=True, split_size=128),
    Case("decode-17-causal", rows=17, keys=513, dim=32, causal=True, split_size=128),
    Case("decode-value-dim-256", heads=(2, 1), rows=2, keys=300, value_dim=256, split_size=128),
    Case("decode-split-1", batch=4, rows=1, keys=600, dim=8, split_size=1),
    Case("decode-split-larger-than-keys", rows=3, keys=37, dim=8, split_size=1000),
    Case("decode-window-most-splits-empty", batch=2, rows=1, keys=4100, dim=8, window=(8, 0), split_size=16),
    Case("decode-lengths", batch=4, heads=(6, 2), rows=1, keys=2100, dim=8, kv_lens=(0, 1, 1500, 2100), split_size=64),
    Case(
        "decode-lengths-causal",
        batch=3,
        heads=(4, 2),
        rows=4,
        keys=1100,
        dim=8,
        causal=True,
        kv_lens=(2, 1026, 1100),
        split_size=256,
    ),
    Case(
        "decode-starts",
        batch=4,
        heads=(6, 2),
        rows=3,
        keys=2100,
        dim=8,
        causal=True,
        kv_starts=(0, 1000, 2095, 7),
        kv_lens=(2100, 1500, 2100, 7),
        split_size=256,
    ),
    Case("decode-alibi-per-sequence", batch=3, heads=(4, 2), rows=3, keys=600, dim=8, alibi="per-sequence"),
    Case("decode-bias-mask", batch=2, heads=(4, 2), rows=3, keys=600, dim=8, mask="bool-keys", bias="float-heads"),
    Case("decode-query-lengths", batch=4, rows=5, keys=600, dim=8, causal=True, q_lens=(0, 1, 3, 5), split_size=128),
    Case("decode-starts-mask", batch=2, rows=2, keys=600, dim=8, mask="float", kv_starts=(300, 5), split_size=128),
    Case("decode-sinks", heads=(6, 3), rows=2, keys=2100, dim=16, sinks=True, split_size=1024),
    Case("decode-alibi-softcap", heads=(4, 2), rows=3, keys=1100, alibi=True, softcap=3.0, split_size=64),
    Case("decode-mask-bool", batch=2, rows=4, keys=1100, dim=16, mask="bool", split_size=256),
    Case("decode-mask-float-hides", batch=2, rows=4, keys=1100, dim=16, mask="float-hides", split_size=256),
    Case("decode-scores-at-minus-300", batch=4, rows=2, keys=1100, scores="all-at-minus-300", split_size=256),
    Case("decode-scores-rising", batch=4, rows=2, keys=2100, dim=16, scores="rising", split_size=4096),
    Case("decode-scores-falling", batch=4, rows=2, keys=2100, dim=16, scores="falling", split_size=256),
    Case("decode-scores-peak-first", batch=4, rows=1, keys=2100, dim=16, scores="peak-first", split_size=256),
    Case("decode-scores-peak-middle", batch=4, rows=1, keys=2100, dim=16, scores="peak-middle", split_size=4096),
    Case("decode-scores-peak-last", batch=4, rows=1, keys=2100, dim=16, scores="peak-last", split_size=256),
    # Weights that are dropped. Few rows take the tiled kernels then.
    Case("dropout", batch=2, heads=(4, 2), dropout_p=0.3),
    Case("dropout-causal-odd-sizes", rows=71, keys=133, dim=40, value_dim=24, causal=True, dropout_p=0.1),
    Case("dropout-dim-128", heads=(2, 1), rows=70, keys=140, dim=128, dropout_p=0.5),
    Case("dropout-dim-256", heads=(2, 1), rows=33, keys=70, dim=200, value_dim=256, dropout_p=0.5),
    Case(
        "dropout-window-softcap-alibi",
        rows=70,
        keys=300,
        dim=16,
        window=(64, 3),
        softcap=2.0,
        alibi=True,
        dropout_p=0.4,
    ),
    Case("dropout-lengths-sinks", batch=3, sinks=True, kv_lens=(72, 0, 30), dropout_p=0.6),
    Case("dropout-mask-float-hides", batch=2, mask="float-hides", dropout_p=0.2),
    Case("dropout-mask-float-keys", batch=2, mask="float-keys", dropout_p=0.2),
    Case("dropout-all", batch=2, dropout_p=1.0),
    Case(
        "dropout-few-rows", batch=2, heads=(6, 2), rows=3, keys=600, dim=24, causal=True, dropout_p=0.3, split_size=128
    ),
    # Layouts; test_layout.py has the rest.
    Case("layout-heads-in-rows", batch=2, heads=(4, 2), layout="heads-in-rows", causal=True),
    Case("layout-dim-not-last", batch=2, heads=(4, 2), layout="dim-not-last"),
    Case(
        "layout-heads-in-rows-decode",
        batch=2,
        heads=(4, 2),
        rows=1,
        keys=130,
        layout="heads-in-rows",
        split_size=64,
    ),
    # All at once.
    Case(
        "all-features",
        batch=3,
        heads=(6, 2),
        rows=70,
        keys=150,
        dim=40,
        value_dim=24,
        window=(60, 9),
        scale=0.3,
        softcap=2.5,
        alibi=True,
        sinks=True,
        mask="float-hides",
        q_offset=50,
        kv_lens=(150, 66, 100),
        layout="one-of-qkv",
    ),
    Case(
        "all-features-decode",
        batch=3,
        heads=(6, 2),
        rows=3,
        keys=1300,
        dim=40,
        value_dim=24,
        causal=True,
        window=(1100, None),
        scale=0.3,
        softcap=2.5,
        alibi=True,
        sinks=True,
        mask="bool",
        kv_lens=(1300, 300, 0),
        split_size=256,
        layout="one-of-qkv",
    ),
]

LONG = Case("4095x4095", heads=(1, 1), rows=4095, keys=4095, dim=16, causal=True)

assert len({case.id for case in CASES}) == len(CASES)


def case(name: str) -> Case:
    return next(case for case in CASES if case.id == name)
