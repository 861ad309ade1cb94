"""The public names as type checkers and editors read them; `__init__.py` finds them when they are first used."""

from .api import (
    is_patched as is_patched,
    patch_model as patch_model,
    patched as patched,
    schemes_of as schemes_of,
    unpatch_model as unpatch_model,
)
from .calibration.calibrate import Calibration as Calibration, Matching as Matching, calibrate as calibrate
from .calibration.factor_search import DivideAndConquer as DivideAndConquer, Evolution as Evolution
from .calibration.frequency_search import (
    FrequencySearch as FrequencySearch,
    search_frequencies as search_frequencies,
)
from .calibration.layer_choice import LayerChoice as LayerChoice, choose_layers as choose_layers
from .calibration.pair_choice import PairChoice as PairChoice, choose_pairs as choose_pairs
from .calibration.temperature_fit import TemperatureFit as TemperatureFit, fit_temperature as fit_temperature
from .attention_call import Call as Call
from .checking.check import check as check
from .checkpoints.auto_classes import register_family as register_family
from .checkpoints.export import export_stock as export_stock
from .checkpoints.gguf_export import export_gguf as export_gguf
from .checkpoints.inspecting import inspect as inspect
from .description import describe as describe, which_engine as which_engine
from .errors import (
    AlreadyPatchedError as AlreadyPatchedError,
    CheckpointError as CheckpointError,
    HfPosencError as HfPosencError,
    NotPatchedError as NotPatchedError,
    PluginError as PluginError,
    UnknownSchemeError as UnknownSchemeError,
    UnsupportedModelError as UnsupportedModelError,
)
from .families.base import Family as Family
from .forms import (
    Bias as Bias,
    ClippedVectors as ClippedVectors,
    Factors as Factors,
    Form as Form,
    LinearVectors as LinearVectors,
    RelativeKeys as RelativeKeys,
    Slopes as Slopes,
)
from .loading import from_pretrained as from_pretrained
from .lora import load_adapter as load_adapter, lora_config as lora_config
from .modules import (
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
from .registry import available_schemes as available_schemes, register_scheme as register_scheme
from .schemes.base import (
    Dims as Dims,
    EmbeddingScheme as EmbeddingScheme,
    QueryScheme as QueryScheme,
    RotaryScheme as RotaryScheme,
    Scheme as Scheme,
    ScoreScheme as ScoreScheme,
    TokenScheme as TokenScheme,
)
from .upstream.endless_cache import EndlessCache as EndlessCache
from .verification import verify as verify

__version__: str
