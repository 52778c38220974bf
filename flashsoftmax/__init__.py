"""Exact softmax attention that never writes the score matrix."""

from .attention import attention, attention_paged, attention_varlen, merge
from .build import build_info, build_record
from .dropout import dropout_mask
from .state import State

__all__ = ["State", "attention", "attention_paged", "attention_varlen", "build_info", "dropout_mask", "merge"]
__version__ = build_record()["version"]
