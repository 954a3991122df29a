"""How long a model reads, by its configuration alone."""

from transformers import AutoConfig

from pipeline.config import EMBEDDED, FrozenModelConfig
from pipeline.errors import ModelError
from pipeline.models.embedded import CONTEXT
from pipeline.models.forward import positions
from pipeline.models.load import model_path


def context_of(config: FrozenModelConfig) -> int:
    """Tokens that the model's position encoding covers, as `context_length` of the loaded one.

    Raises:
        ModelError: its configuration can't be read.
    """
    path = model_path(config)
    if path == EMBEDDED:
        return CONTEXT
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no configuration that can be read: {error}") from error
    return positions(settings)
