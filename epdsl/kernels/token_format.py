"""How a token lies in a message: payload, then the source's token index, then the experts it goes to.

    [ payload | src_info: i32 token index | topk_info: top_k u16 global expert ids ]

Every part starts at a multiple of `alignment` bytes. No router weight travels: the source applies them in the combine.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .layout import VECTOR_BYTES, align_up


@dataclass(frozen=True)
class TokenFormat:
    """What every format has in common. A format says how many bytes its payload takes and how to pack and unpack it.

    hid_dim    elements of a token
    top_k      experts a token goes to
    alignment  bytes, a power of two of at least 16
    """

    hid_dim: int
    top_k: int
    alignment: int = VECTOR_BYTES

    def __post_init__(self) -> None:
        if self.alignment < VECTOR_BYTES or self.alignment & (self.alignment - 1):
            raise ValueError(f"{type(self).__name__}: alignment={self.alignment} must be a power of two of at least {VECTOR_BYTES} bytes")
        if self.hid_dim < 1 or self.payload_bytes % VECTOR_BYTES:
            raise ValueError(
                f"{type(self).__name__}: a token of {self.hid_dim} elements takes {self.payload_bytes} bytes; "
                f"it must be a multiple of {VECTOR_BYTES}"
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the token itself."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many bytes its payload takes")

    @property
    def tile_rows(self) -> int:
        """Rows a block claims at a time when it copies received tokens out."""
        return 128

    def token_size(self) -> int:
        return align_up(self.payload_bytes, self.alignment)

    def src_info_size(self) -> int:
        return align_up(4, self.alignment)

    def topk_info_size(self) -> int:
        return align_up(2 * self.top_k, self.alignment)

    @property
    def src_info_offset(self) -> int:
        return self.token_size()

    @property
    def topk_info_offset(self) -> int:
        return self.token_size() + self.src_info_size()

    def msg_size(self) -> int:
        """Bytes of one message."""
        return self.token_size() + self.src_info_size() + self.topk_info_size()

    @ep.func
    def src_info(self, message: ep.Ptr[ep.u8]) -> ep.Ptr[ep.i32]:
        return (message + self.src_info_offset).cast(ep.i32)

    @ep.func
    def topk_info(self, message: ep.Ptr[ep.u8]) -> ep.Ptr[ep.u16]:
        return (message + self.topk_info_offset).cast(ep.u16)


@dataclass(frozen=True)
class BF16TokenFormat(TokenFormat):
    """The token as it is: `hid_dim` bf16 values."""

    @property
    def payload_bytes(self) -> int:
        return 2 * self.hid_dim

    @ep.func
    def copy_token_to_send_buf(self, message: ep.Ptr[ep.u8], token: ep.Ptr[ep.bf16], group):
        """All threads of `group` copy one token into the payload of `message`."""
        ep.copy(message, token.cast(ep.u8), self.payload_bytes, group=group)

    @ep.func
    def copy_msg_to_output_tensor(self, output: ep.Ptr[ep.bf16], message: ep.Ptr[ep.u8]):
        """One warp copies the payload of `message` to a row of the output."""
        ep.warp_copy(output.cast(ep.u8), message, self.payload_bytes)
