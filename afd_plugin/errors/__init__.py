"""Every error that afd_plugin raises on purpose.

::

    AfdError
    ├── ConfigError (ValueError)          additional_config["afd"] is wrong
    │   ├── UnknownOption
    │   ├── OptionTypeError
    │   └── OptionValueError
    │       └── TooManyUbatches
    ├── BatchError (ValueError)           the scheduled batch contradicts itself
    ├── PlanError (ValueError)            a policy, alignment or cut that cannot be
    ├── KVLayoutError (ValueError)        block tables or slot mapping do not fit the batch
    ├── MetadataError (ValueError)        attention metadata cannot be sliced
    │   ├── UnknownMetadataClass
    │   ├── MissingFieldRule
    │   ├── StaleFieldRule
    │   ├── RefusedField
    │   └── MetadataMismatch
    ├── StageTensorError (ValueError)     a stage input or output has the wrong shape
    ├── LayoutError (ValueError)          a plan and the ranks' token layout do not fit
    ├── AgreementError                    ranks did not come to one decision
    │   ├── PlanDisagreement
    │   ├── PlacementDisagreement
    │   └── SilentRanks
    ├── RoutingError (ValueError)         expert ids or weights that cannot be used
    │   ├── RoutingOpError                the routing operator cannot be registered or run
    │   └── RoutingPayloadError           routing that cannot travel, or did not arrive whole
    ├── StateRestoreError                 mutable state could not be put back
    ├── UpstreamDrift                     the installed vLLM is not what was pinned
    └── UnsupportedSetup                  refused at start-up, one class a reason
        ├── PrefillContextParallel      ├── EncoderDecoder
        ├── DecodeContextParallel       ├── AttentionBackendUnsupported
        ├── SpeculativeDecoding         ├── GateWithoutConnector
        ├── CapturedGraph               ├── TensorParallel
        ├── CompiledModel               ├── DataParallel
        ├── NativeDualBatchOverlap      ├── PipelineParallel
        ├── ModelRunnerV2               ├── SequenceParallelMoE
        ├── MultimodalPrefixLM          ├── LoRAAdapters
        ├── KVConnector                 ├── ExpertLoadBalancing
        ├── SharedKVFastPrefill         ├── PoolingRunner
        ├── RecurrentState              ├── UncoveredOption
        ├── UnknownProfileFlag          ├── QuantizedTransport
        ├── ConnectorUbatching          ├── ConnectorTensorParallel
        ├── ConnectorCompiled           ├── ConnectorSpeculativeDecoding
        ├── FusedCommunication          ├── BalancedRoutingOffPath
        ├── UncoveredWithConnector      ├── BalancedRoutingModelRunnerV2
        ├── BalancedRoutingInKernel     ├── BalancedRoutingWithoutExperts
        └── ContextNeedsChunkedPrefill
"""

from __future__ import annotations

from afd_plugin.errors.base import (
    AfdError,
    AgreementError,
    BatchError,
    ConfigError,
    KVLayoutError,
    LayoutError,
    MetadataError,
    MetadataMismatch,
    MissingFieldRule,
    OptionTypeError,
    OptionValueError,
    PlacementDisagreement,
    PlanDisagreement,
    PlanError,
    RefusedField,
    RoutingError,
    RoutingOpError,
    RoutingPayloadError,
    SilentRanks,
    StageTensorError,
    StaleFieldRule,
    StateRestoreError,
    TooManyUbatches,
    UnknownMetadataClass,
    UnknownOption,
    UpstreamDrift,
)
from afd_plugin.errors.refusals import (
    AttentionBackendUnsupported,
    BalancedRoutingInKernel,
    BalancedRoutingModelRunnerV2,
    BalancedRoutingOffPath,
    BalancedRoutingWithoutExperts,
    CapturedGraph,
    CompiledModel,
    ConnectorCompiled,
    ConnectorSpeculativeDecoding,
    ConnectorTensorParallel,
    ConnectorUbatching,
    ContextNeedsChunkedPrefill,
    DataParallel,
    DecodeContextParallel,
    EncoderDecoder,
    ExpertLoadBalancing,
    FusedCommunication,
    GateWithoutConnector,
    KVConnector,
    LoRAAdapters,
    ModelRunnerV2,
    MultimodalPrefixLM,
    NativeDualBatchOverlap,
    PipelineParallel,
    PoolingRunner,
    PrefillContextParallel,
    QuantizedTransport,
    RecurrentState,
    SequenceParallelMoE,
    SharedKVFastPrefill,
    SpeculativeDecoding,
    TensorParallel,
    UncoveredOption,
    UncoveredWithConnector,
    UnknownProfileFlag,
    UnsupportedSetup,
)

__all__ = [
    "AfdError",
    "AgreementError",
    "AttentionBackendUnsupported",
    "BalancedRoutingInKernel",
    "BalancedRoutingModelRunnerV2",
    "BalancedRoutingOffPath",
    "BalancedRoutingWithoutExperts",
    "BatchError",
    "CapturedGraph",
    "CompiledModel",
    "ConfigError",
    "ConnectorCompiled",
    "ConnectorSpeculativeDecoding",
    "ConnectorTensorParallel",
    "ConnectorUbatching",
    "ContextNeedsChunkedPrefill",
    "DataParallel",
    "DecodeContextParallel",
    "EncoderDecoder",
    "ExpertLoadBalancing",
    "FusedCommunication",
    "GateWithoutConnector",
    "KVConnector",
    "KVLayoutError",
    "LayoutError",
    "LoRAAdapters",
    "MetadataError",
    "MetadataMismatch",
    "MissingFieldRule",
    "ModelRunnerV2",
    "MultimodalPrefixLM",
    "NativeDualBatchOverlap",
    "OptionTypeError",
    "OptionValueError",
    "PipelineParallel",
    "PlacementDisagreement",
    "PlanDisagreement",
    "PlanError",
    "PoolingRunner",
    "PrefillContextParallel",
    "QuantizedTransport",
    "RecurrentState",
    "RefusedField",
    "RoutingError",
    "RoutingOpError",
    "RoutingPayloadError",
    "SequenceParallelMoE",
    "SharedKVFastPrefill",
    "SilentRanks",
    "SpeculativeDecoding",
    "StageTensorError",
    "StaleFieldRule",
    "StateRestoreError",
    "TensorParallel",
    "TooManyUbatches",
    "UncoveredOption",
    "UncoveredWithConnector",
    "UnknownMetadataClass",
    "UnknownOption",
    "UnknownProfileFlag",
    "UnsupportedSetup",
    "UpstreamDrift",
]
