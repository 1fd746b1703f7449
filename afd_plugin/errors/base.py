"""What goes wrong with options, batches, plans, metadata, ranks and routing."""

from __future__ import annotations


class AfdError(Exception):
    """Base of all deliberate errors of afd_plugin."""


class ConfigError(AfdError, ValueError):
    """``additional_config["afd"]`` holds something that is not allowed."""


class UnknownOption(ConfigError):
    """A key that no option has."""


class OptionTypeError(ConfigError):
    """A value of the wrong type."""


class OptionValueError(ConfigError):
    """A value of the right type that is not allowed."""


class TooManyUbatches(OptionValueError):
    """More than two stages are asked for; exactly two are planned."""


class BatchError(AfdError, ValueError):
    """Scheduled or computed token counts that cannot describe a step."""


class PlanError(AfdError, ValueError):
    """A policy, alignment, threshold or cut that cannot be planned with."""


class KVLayoutError(AfdError, ValueError):
    """Block size, block tables or slot mapping that do not fit the batch."""


class MetadataError(AfdError, ValueError):
    """Attention metadata that cannot be sliced safely."""


class UnknownMetadataClass(MetadataError):
    """A metadata class for which no field rules are known."""


class MissingFieldRule(MetadataError):
    """A field of the metadata class that has no rule."""


class StaleFieldRule(MetadataError):
    """A rule for a field that the metadata class does not have."""


class RefusedField(MetadataError):
    """A field is set whose value cannot be derived for one stage."""


class MetadataMismatch(MetadataError):
    """A field that contradicts the batch of the plan."""


class StageTensorError(AfdError, ValueError):
    """A stage input or output whose token axis, length or type is wrong."""


class LayoutError(AfdError, ValueError):
    """A plan, a process group and a sharded token layout that do not fit each other."""


class AgreementError(AfdError):
    """The ranks of a group did not come to one decision; no stage may be run."""


class PlanDisagreement(AgreementError):
    """Ranks decided differently.  ``decisions``: what each rank decided, in words."""

    def __init__(self, message: str, decisions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.decisions = decisions


class PlacementDisagreement(AgreementError):
    """Ranks differ in where experts are chosen.  ``placements``: what each rank is told."""

    def __init__(self, message: str, placements: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.placements = placements


class SilentRanks(AgreementError):
    """Ranks did not answer in time.  ``silent``: which; empty where that cannot be known."""

    def __init__(self, message: str, silent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.silent = silent


class RoutingError(AfdError, ValueError):
    """Expert ids, weights or counts that cannot be routed with."""


class RoutingOpError(RoutingError):
    """The routing operator cannot be registered, or is called where it cannot work."""


class RoutingPayloadError(RoutingError):
    """A routing payload has a wrong shape, dtype, layout or device, or its bytes are not whole."""


class StateRestoreError(AfdError):
    """A piece of mutable state could not be put back after a stage."""


class UpstreamDrift(AfdError):
    """The installed upstream package differs from the pinned contract."""
