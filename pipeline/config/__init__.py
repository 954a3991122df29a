"""Settings shared by the steps.

One frozen dataclass per concern. A field's docstring is its `--help` text and its documentation.
"""

from pipeline.config.data import (
    EMBEDDED,
    DataConfig,
    RowColumns,
    RowShare,
    RowUse,
    TextDataConfig,
    check_split,
    find_column,
    parse_literal,
)
from pipeline.config.model import (
    AdapterVariant,
    FrozenModelConfig,
    Kernels,
    LoraConfig,
    Precision,
    Quantize,
    TrainedModelConfig,
    ZeroConfig,
)
from pipeline.config.optim import DEFAULT_OPTIM, LossScaleConfig, OptimConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.step import (
    EarlyStopping,
    Generation,
    ModelUse,
    SaveInterval,
    StepConfig,
    Tracker,
    Workload,
    affects_result,
)
