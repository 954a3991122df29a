"""What step 3 does on each of its processes."""

from dataclasses import fields, replace

from pipeline.config import FrozenModelConfig, Generation, ModelUse, TrainedModelConfig, Workload
from step3_ppo.settings import PPOSettings


def workload_of(config: PPOSettings, world: int) -> Workload:
    """Each iteration generates responses, scores them, and learns from them."""
    processes = config.parallel.pipelines(world)
    return Workload(
        world=world,
        parallel=config.parallel,
        models=_models(config),
        iteration_rows=config.rollout_size,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        length=config.max_length,
        targets=config.max_new_tokens,
        generation=Generation(
            role="actor",
            phase="each iteration",
            count=config.responses_per_process(processes),
            group_size=config.group_size,
            batch_size=config.generation_batch_size,
            prompt_length=config.max_prompt_length,
            new_tokens=config.max_new_tokens,
            tensor_parallel=config.inference_tp_size,
            shared_by=config.parallel.pp,
            keeps_replica=config.replica == "resident",
            offloads_training=config.offload_in_generation,
        ),
        epochs=config.ppo_epochs,
        reuses_forward=config.reuses_forward(processes=processes),
    )


def _models(config: PPOSettings) -> tuple[ModelUse, ...]:
    reward = ModelUse(
        role="reward",
        settings=config.reward,
        scores=True,
        sharded_like=_if_sharded(config.reward_layout),
        scored=1,
    )
    models = (
        ModelUse(
            role="actor",
            settings=config.actor,
            scored=1 if _has_reference_of_its_own(config) else 2,
            text_length=config.data.max_length if config.ptx_coef > 0 else None,
            host_copies=config.keep_best,
            keeps_average=config.ema_decay is not None,
        ),
        ModelUse(role="critic", settings=config.critic, scores=True, scored=1),
        ModelUse(
            role="reference",
            settings=_reference(config),
            sharded_like=_if_sharded(config.actor),
            scored=1,
        ),
        reward,
        *(
            replace(reward, role=f"reward_{number}", settings=member)
            for number, member in enumerate(config.reward_members, start=2)
        ),
        ModelUse(role="base", settings=config.base, phase_only=True),
    )
    return tuple(model for model in models if model.role not in config.unused_roles)


def _has_reference_of_its_own(config: PPOSettings) -> bool:
    return config.reference.path is not None or config.actor.lora is None


def _reference(config: PPOSettings) -> FrozenModelConfig:
    """The actor as it starts, where no other is named; with LoRA it is the actor's own base."""
    if config.reference.path is not None or not _has_reference_of_its_own(config):
        return config.reference
    shared = {field.name: getattr(config.actor, field.name) for field in fields(FrozenModelConfig)}
    return FrozenModelConfig(**shared)


def _if_sharded(model: TrainedModelConfig) -> TrainedModelConfig | None:
    return model if model.zero_stage == 3 else None
