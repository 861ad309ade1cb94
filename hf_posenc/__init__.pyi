"""The public names as type checkers and editors read them; `__init__.py` finds them when they are first used."""

from .api import (
    is_patched as is_patched,
    patch_model as patch_model,
    patched as patched,
    schemes_of as schemes_of,
    unpatch_model as unpatch_model,
)
from .calibration.calibrate import Calibration as Calibration, Matching as Matching, calibrate as calibrate
from .calibration.choices import LayerChoice as LayerChoice, choose_layers as choose_layers
from .core.attention_call import Call as Call
from .checking.check import check as check
from .checking.describe import describe as describe, which_engine as which_engine
from .checking.other_engines import OtherEngine as OtherEngine
from .checking.verify import verify as verify
from .checkpoints.auto_classes import register_family as register_family
from .checkpoints.export import export_stock as export_stock
from .checkpoints.gguf_export import export_gguf as export_gguf
from .core.errors import (
    AlreadyPatchedError as AlreadyPatchedError,
    CheckpointError as CheckpointError,
    HfPosencError as HfPosencError,
    NotPatchedError as NotPatchedError,
    PluginError as PluginError,
    UnknownSchemeError as UnknownSchemeError,
    UnsupportedModelError as UnsupportedModelError,
)
from .families.base import Family as Family
from .core.forms import (
    Bias as Bias,
    ClippedVectors as ClippedVectors,
    Factors as Factors,
    Form as Form,
    LinearVectors as LinearVectors,
    RelativeKeys as RelativeKeys,
    Sides as Sides,
    Slopes as Slopes,
    Waves as Waves,
)
from .loading import from_pretrained as from_pretrained
from .loading import inspect as inspect
from .checkpoints.lora import load_adapter as load_adapter, lora_config as lora_config
from .core.modules import (
    PositionEmbedding as PositionEmbedding,
    QueryModule as QueryModule,
    Rotation as Rotation,
    ScoreModule as ScoreModule,
    TokenModule as TokenModule,
)
from .parallel import (
    context_group as context_group,
    context_parallel as context_parallel,
    shard_sequence as shard_sequence,
)
from .core.registry import available_schemes as available_schemes, register_scheme as register_scheme
from .schemes.base import (
    Dims as Dims,
    EmbeddingScheme as EmbeddingScheme,
    HiddenNumbers as HiddenNumbers,
    QueryScheme as QueryScheme,
    RotaryScheme as RotaryScheme,
    Scheme as Scheme,
    ScoreScheme as ScoreScheme,
    TokenScheme as TokenScheme,
    WeightScheme as WeightScheme,
)

__version__: str
