"""Attention for the models of Hugging Face transformers.

    from flashsoftmax.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

transformers describes which keys a query sees by a mask. Most masks are a causal band, a window and padding, which
attention knows as options and then skips what is hidden. So the mask of this module is a :class:`LazyMask`: a tensor
that carries those options, and writes the dense mask only for who reads it as a tensor.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.utils.import_utils import is_tracing

from ..attention import attention, attention_varlen

NAME = "online_softmax"

TAKEN = ("flash", "sdpa", "flex_attention", "eager", "paged", "/")
"""Parts of a name by which transformers recognizes its own implementations and hub kernels."""


def register(name: str = NAME) -> str:
    """Makes this attention known to transformers and returns its name, for ``attn_implementation``.

    Args:
        name: must not contain "flash", "sdpa", "flex_attention", "eager", "paged" or "/": transformers takes such a
            name for one of its own implementations.

    As with transformers' flash_attention_2, tokens that are padding get output 0, and their logits mean nothing. Models
    without an attention interface would misread the mask and are refused. So is ``output_attentions=True``: the
    weights are never written.
    """
    for part in TAKEN:
        if part in name:
            raise ValueError(f"name: {name!r}, wanted one without {part!r}, which transformers takes for its own")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, create_mask)
    return name


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers. query, key and value are [B, H, S, D]; the result is [B, S, H, D].

    attention_mask is a LazyMask, a dense bool or float mask [B, 1 or H, Sq, Sk], or None: then a module that is causal
    gets a causal mask, which starts at key 0, and sliding_window holds. A mask has all that already.
    """
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: True, wanted False: the weights are never written; use 'eager'")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:
        options["dropout_p"] = dropout
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    band = _band(sliding_window, causal)

    if kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None:
        if position_bias is not None:
            raise ValueError("position_bias: a Tensor, wanted None beside cu_seq_lens_q")
        lengths = _Lengths(*(kwargs.get(x) for x in _Lengths._fields))
        return _attend_packed(query, key, value, lengths, window=band, **options), None

    attn_mask, attn_bias = attention_mask, position_bias
    if isinstance(attention_mask, LazyMask):
        mask = attention_mask.settled()
        if mask.packed is None:
            attn_mask = mask.holes
            options |= {"window": None if mask.window == (None, None) else mask.window, "q_offset": mask.q_offset}
            options |= {"kv_starts": mask.kv_starts, "kv_lens": mask.kv_lens, "q_lens": mask.q_lens}
        elif position_bias is None:
            lengths = _Lengths(mask.packed, mask.packed, mask.max_length, mask.max_length)
            return _attend_packed(query, key, value, lengths, window=mask.window, **options), None
        else:
            attn_mask = mask.dense()
    elif attention_mask is None:
        options["window"] = band if query.size(2) > 1 else (band[0], None)
        # A static cache is longer than its first queries, which are at its start.
        options["q_offset"] = 0 if causal and query.size(2) > 1 else None
    elif attention_mask.is_floating_point() and position_bias is not None:
        attn_mask, attn_bias = None, attention_mask + position_bias
    out = attention(query, key, value, attn_mask, attn_bias=attn_bias, **options)
    return out.transpose(1, 2).contiguous(), None


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of transformers: None where attend needs no mask, a LazyMask where a few options say it all,
    else a dense bool mask [B, 1, Sq, Sk]."""
    if config is not None and (reason := _refusal(type(config))):
        raise ValueError(reason)
    skips = {
        "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }
    dense = functools.partial(
        masking_utils.sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    )
    # Whether padding is contiguous is read from it, which a graph cannot do.
    pattern = None if is_tracing() else _pattern(mask_function)
    start: Any = q_offset - kv_offset
    is_past_end = isinstance(start, int) and start + q_length > kv_length
    if pattern is None or (pattern.right == 0 and is_past_end):
        return dense(device=device, **skips, **kwargs)  # type: ignore[no-any-return]

    left, right = pattern.left, pattern.right
    if left is not None and isinstance(start, int) and left >= start + q_length - 1:
        left = None  # the window holds all keys
    mask = LazyMask((batch_size, 1, q_length, kv_length), device, (left, right))
    if pattern.packed is not None:
        mask.pack(pattern.packed)
        return mask
    if right == 0:  # the last query is at key kv_lens - 1, or q_lens - 1 is
        mask.kv_lens = _per_sequence(start + q_length, batch_size, device)
    else:
        mask.kv_lens = _per_sequence(kv_length, batch_size, device)
        mask.q_offset = None if (left, right) == (None, None) else int(start)
    has_padding = attention_mask is not None and mask.pad(
        masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length],
        start,
    )
    if right == 0:
        is_whole = isinstance(start, int) and start + q_length == kv_length and q_length in (1, kv_length)
        is_needless = allow_is_causal_skip and left is None and is_whole
    else:
        is_needless = allow_is_bidirectional_skip and (left, right) == (None, None)
    return None if is_needless and not has_padding else mask


class LazyMask(Tensor):
    """A bool mask [B, 1, Sq, Sk], True where a query sees a key, as the options of attention that mean the same.

    Any operation but a move to a device or a copy writes the dense mask, once, and works on that.
    """

    window: tuple[int | None, int | None]
    q_offset: int | None
    kv_lens: Tensor | None
    kv_starts: Tensor | None
    q_lens: Tensor | None
    holes: Tensor | None
    """[B, 1, 1, Sk], False at padding between other keys."""
    packed: Tensor | None
    """cu_seqlens of the sequences that follow each other in the rows of the batch."""
    max_length: int
    is_exposed = False
    """Whether someone has a view of the dense mask, or wrote to it. Then only the dense mask counts."""
    _dense: Tensor | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    TENSORS = ("kv_lens", "kv_starts", "q_lens", "holes", "packed")

    @staticmethod
    def __new__(
        cls: type[LazyMask], shape: Any, device: Any, window: Any, q_offset: int | None = None, max_length: int = 0
    ) -> LazyMask:
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.window, mask.q_offset, mask.max_length = window, q_offset, max_length
        for name in cls.TENSORS:
            setattr(mask, name, None)
        return mask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def pad(self, visible: Tensor, start: int | Tensor) -> bool:
        """Hides the keys that are padding: False in visible [B, Sk]. Returns whether there are any.

        start is the position of query 0 among the keys.
        """
        assert self.kv_lens is not None
        index = torch.arange(visible.size(1), device=visible.device)
        starts = torch.where(visible, index, visible.size(1)).amin(1)
        ends = torch.where(visible, index + 1, 0).amax(1)
        ends = torch.minimum(ends, self.kv_lens)
        filled = (visible & (index < ends[:, None])).sum(1)
        found = torch.stack((starts > 0, ends < self.kv_lens, filled < ends - starts)).any(1).tolist()
        if found[0]:
            self.kv_starts = starts
        if found[1]:
            if self.window[1] == 0:  # causal: the queries are the last of the keys, and some are padding too
                self.q_lens = (ends - start).clamp(0, self.size(2))
            self.kv_lens = ends
        if found[2]:
            self.holes = visible[:, None, None]
        return any(found)

    def pack(self, sequence: Tensor) -> None:
        """Lets each query see its own sequence only. sequence [B, S] numbers those of a row."""
        sequence = sequence.expand(self.size(0), -1)
        is_first = torch.ones_like(sequence, dtype=torch.bool)
        is_first[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
        starts = is_first.flatten().nonzero().squeeze(1)
        self.packed = torch.cat((starts, starts.new_tensor([sequence.numel()])))
        self.max_length = int(self.packed.diff().max())

    def settled(self) -> LazyMask:
        """The mask to take options from: itself, or if it is exposed, one that has only the dense mask."""
        if not self.is_exposed:
            return self
        mask = LazyMask(self.shape, self.device, (None, None))
        mask.holes = self.dense()
        return mask

    def dense(self) -> Tensor:
        """The mask as a tensor that is written."""
        if self._dense is None:
            self._dense = self._write()
        return self._dense

    def _write(self) -> Tensor:
        batch, _, rows, keys = self.shape
        key, query = torch.arange(keys, device=self.device), torch.arange(rows, device=self.device)[:, None]
        visible = torch.ones((batch, 1, rows, keys), dtype=torch.bool, device=self.device)
        if self.packed is not None:
            numbers = torch.bucketize(torch.arange(batch * keys, device=self.device), self.packed[1:], right=True)
            numbers = numbers.view(batch, 1, keys)
            visible &= numbers[..., None] == numbers[..., None, :]
        position = query + (self.q_offset or 0)
        if self.kv_lens is not None:
            ends = self.kv_lens.view(-1, 1, 1, 1)
            visible &= key < ends
            if self.q_offset is None:
                position = query + ends - (rows if self.q_lens is None else self.q_lens.view(-1, 1, 1, 1))
        if self.kv_starts is not None:
            visible &= key >= self.kv_starts.view(-1, 1, 1, 1)
        if self.q_lens is not None:
            visible &= query < self.q_lens.view(-1, 1, 1, 1)
        if self.holes is not None:
            visible &= self.holes
        left, right = self.window
        if left is not None:
            visible &= key >= position - left
        if right is not None:
            visible &= key <= position + right
        return visible

    def _map(self, function: Callable[[Tensor], Any]) -> LazyMask:
        parts = {name: function(x) for name in self.TENSORS if (x := getattr(self, name)) is not None}
        device = next(iter(parts.values())).device
        return self.__tensor_unflatten__(parts, (device, self.window, self.q_offset, self.max_length), self.shape, None)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in self.TENSORS if getattr(self, name) is not None]
        return names, (self.device, self.window, self.q_offset, self.max_length)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> LazyMask:
        mask = LazyMask(size, *context)
        for name, x in parts.items():
            setattr(mask, name, x)
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        copies = (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default)
        if function in copies and kwargs.get("dtype") in (None, torch.bool) and not args[0].is_exposed:
            arguments = {name: x for name, x in kwargs.items() if name in ("device", "non_blocking")}
            return args[0]._map(lambda x: function(x, **arguments))
        if any(x.alias_info is not None for x in function._schema.returns) and isinstance(args[0], LazyMask):
            args[0].is_exposed = True
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
        return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, window={self.window})"


class _Pattern(NamedTuple):
    """Which keys a mask function shows: left and right as in attention's window."""

    left: int | None = None
    right: int | None = None
    packed: Tensor | None = None
    """[B, S], the number of the sequence that a token belongs to."""
    restarts: bool = False
    """Whether positions count from the start of each sequence."""


class _Lengths(NamedTuple):
    cu_seq_lens_q: Any
    cu_seq_lens_k: Any
    max_length_q: Any
    max_length_k: Any


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, lengths: _Lengths, **options: Any) -> Tensor:
    """Attention where sequences follow each other in the rows of the batch, without padding."""
    cu_q, cu_k, max_q, max_k = lengths
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    max_q = int(cu_q.diff().max()) if max_q is None else max_q
    max_k = int(cu_k.diff().max()) if max_k is None else max_k
    out: Tensor = attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **options)
    return out.reshape(query.size(0), query.size(2), *out.shape[1:])


def _band(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None]:
    """attention's window: sliding_window counts the query's own key."""
    reach = None if sliding_window is None else sliding_window - 1
    return reach, 0 if causal else reach


def _per_sequence(length: int | Tensor, batch: int, device: torch.device | str) -> Tensor:
    if isinstance(length, Tensor):
        return length.to(device).expand(batch)
    return torch.full((batch,), length, device=device)


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


AND = _code(masking_utils.and_masks(masking_utils.causal_mask_function))
WINDOW = _code(masking_utils.sliding_window_overlay(1))
WINDOW_BOTH_WAYS = _code(masking_utils.sliding_window_bidirectional_overlay(1))
RESTARTED = _code(masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, None))
PACKED = _code(masking_utils.packed_sequence_mask_function(None))
"""transformers composes its masks of closures, which are known by their code."""


def _pattern(function: Callable[..., Any]) -> _Pattern | None:
    """What a mask function of transformers shows; None if it is none of the known ones."""
    pattern = _part(function)
    return None if pattern is None or pattern.restarts != (pattern.packed is not None) else pattern


def _part(function: Callable[..., Any]) -> _Pattern | None:
    if function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    code = _code(function)
    if code not in (AND, WINDOW, WINDOW_BOTH_WAYS, RESTARTED, PACKED):
        return None
    cells = inspect.getclosurevars(function).nonlocals
    if code is WINDOW:
        return _Pattern(left=cells["sliding_window"] - 1)
    if code is WINDOW_BOTH_WAYS:
        return _Pattern(cells["sliding_window"], cells["sliding_window"])
    if code is PACKED:
        return _Pattern(packed=cells["packed_sequence_mask"])
    if code is RESTARTED:
        inner = _part(cells["mask_function"])
        return None if inner is None else inner._replace(restarts=True)
    parts = [_part(part) for part in cells["mask_functions"]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return _Pattern(
        left=min((x.left for x in known if x.left is not None), default=None),
        right=min((x.right for x in known if x.right is not None), default=None),
        packed=next((x.packed for x in known if x.packed is not None), None),
        restarts=any(x.restarts for x in known),
    )


@torch.compiler.assume_constant_result
def _refusal(config: type) -> str | None:
    """Why a model is refused: it asks for a mask, but computes attention by itself and would misread the mask.

    The model is in the module beside that of its configuration.
    """
    name = config.__module__.replace("configuration_", "modeling_")
    module = sys.modules.get(name)
    if module is None or name == config.__module__ or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return None
    classes: list[Any] = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, PreTrainedModel)]
    if all(x.__module__ != name for x in classes) or any(x._supports_attention_backend for x in classes):
        return None
    return (
        f"attn_implementation: {config.__name__.removesuffix('Config')} models compute attention by themselves "
        "(_supports_attention_backend is False) and would misread the mask; wanted 'eager'"
    )
