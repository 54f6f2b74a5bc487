"""Host memory that CUDA devices copy to and from directly: its pages are registered with the driver, and stay in place.

Memory that is unmapped while it is registered leaves a stale entry. The next mapping at the same address, which the
kernel likes to give, is then refused ("already mapped"), and the refusal shows at some later call.
"""

import mmap
from contextlib import suppress

import torch

from weft.memory.nameless_file import TierError


def pin(buffer: torch.Tensor) -> None:
    """Register the memory of ``buffer`` with the CUDA driver, for copies without a detour.

    ``buffer``: uint8 tensor on the host, whose memory begins at a page. Raises :class:`TierError` if the driver
    refuses.
    """
    try:
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        )
    except RuntimeError as error:
        # Copies through other memory would go on, at a third of the speed, without a word.
        raise TierError(
            f"{buffer.numel():,} bytes of the host's memory cannot be pinned for copies: {error}"
        ) from None


def unpin(address: int) -> None:
    """End the registration of the memory at ``address`` with the CUDA driver. Call it before the memory is unmapped."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class PinnedPages(mmap.mmap):
    """Anonymous memory mapping of this process that :func:`pin` can register; closing it first ends the
    registration.

    ``pinned_at``: address of the registered memory; 0 as long as none is registered.
    """

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at:
            # at the end of the process the driver may be gone already
            with suppress(Exception):
                unpin(self.pinned_at)
