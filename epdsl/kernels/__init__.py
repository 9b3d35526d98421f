"""The expert-parallel kernel family, written in the language."""

from __future__ import annotations

from .combine import EPCombineKernel
from .dispatch import EPDispatchKernel
from .dispatch_parameters import EPRoleSplit
from .layout import EPLocalSyncCounters
from .quantized_format import FORMATS, BlockwiseFP8TokenFormat, MXFP4TokenFormat, MXFP8TokenFormat, NVFP4TokenFormat
from .signal import ep_signal_completion
from .token_format import BF16TokenFormat, TokenFormat
from .trace import NullTrace, RingTrace, TraceBuf

__all__ = [
    "FORMATS",
    "BF16TokenFormat",
    "BlockwiseFP8TokenFormat",
    "EPCombineKernel",
    "EPDispatchKernel",
    "EPLocalSyncCounters",
    "EPRoleSplit",
    "MXFP4TokenFormat",
    "MXFP8TokenFormat",
    "NVFP4TokenFormat",
    "NullTrace",
    "RingTrace",
    "TokenFormat",
    "TraceBuf",
    "ep_signal_completion",
]
