"""The ``vllm.general_plugins`` entry point: completes or raises, as often as it is called."""

from __future__ import annotations

from afd_plugin.compat.known import check_versions, vllm_ascend_version

_done = False


def register() -> None:
    """Check the installed vLLM against the pinned contracts.

    vLLM calls this in every process.  It is cheap after the first time.  Raises
    :class:`~afd_plugin.errors.UpstreamDrift` or a metadata-rule error; vLLM then does not
    start, which is the point: a fault here must not surface as wrong numbers later.
    """
    global _done
    if _done:
        return
    # First, so that another release is named before its modules fail to import.
    check_versions()
    # vLLM-Ascend's modules must not be imported as early as this; AFDNPUWorker checks them.
    if vllm_ascend_version() is None:
        from afd_plugin.compat.vllm import check_drift

        check_drift()
    _done = True
