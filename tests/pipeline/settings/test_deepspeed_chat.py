"""Messages about DeepSpeed-Chat's options, from the table on its page."""

import pytest

from pipeline.plan.request import parse_request
from pipeline.settings.build import build_config
from pipeline.system.errors import ConfigError
from step2_reward.config import RewardConfig
from train import STAGES


def test_deepspeed_chat_option_raises_with_its_replacement() -> None:
    hint = "DeepSpeed-Chat's option corresponds to --lora or --MODEL.lora.rank"
    with pytest.raises(ConfigError, match=f"^there is no option --lora-dim; {hint}"):
        parse_request(["--lora_dim", "1"], STAGES)
    with pytest.raises(ConfigError, match=f"^there is no setting lora_dim; {hint}"):
        build_config(RewardConfig, [], [("lora_dim", ["1"])])
