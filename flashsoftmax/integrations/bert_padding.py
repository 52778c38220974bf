"""flash_attn.bert_padding: between padded batches [B, S, ...] and packed sequences [T, ...]. All are differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x that the indices [T] name."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of index_first_axis: values in the rows of a tensor that is 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(rows [T, ...], their indices [T] in the padded batch, cu_seqlens [B + 1], longest sequence, used tokens [B]).

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], bool or int: not 0 where there is a token.
        unused_mask: [B, S], likewise: tokens that are packed too, but do not count as used.
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_unpadded(hidden_states, packed, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As unpad_input, without the used tokens, for rows that hold several sequences each.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: [B, S], int: the lengths of the sequences in each row, then 0.
    """
    rows = attention_mask_in_length.sum(-1, keepdim=True)
    is_token = torch.arange(attention_mask_in_length.size(1), device=rows.device) < rows
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    return _unpadded(hidden_states, is_token, lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The rows [T, ...] at their places in a padded batch [batch, seqlen, ...], which is 0 elsewhere."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _unpadded(hidden_states: Tensor, is_token: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = is_token.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
