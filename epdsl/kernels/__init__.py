"""The expert-parallel kernel family, written in the language."""

from __future__ import annotations

from .combine import EPCombineKernel
from .dispatch import EPDispatchKernel
from .layout import EPLocalSyncCounters
from .signal import ep_signal_completion
from .token_format import BF16TokenFormat, TokenFormat

__all__ = ["BF16TokenFormat", "EPCombineKernel", "EPDispatchKernel", "EPLocalSyncCounters", "TokenFormat", "ep_signal_completion"]
