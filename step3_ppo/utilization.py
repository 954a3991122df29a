"""How near the updates of actor and critic come to what the processors can do."""

from dataclasses import dataclass

from pipeline.parallel.mesh import Mesh
from pipeline.utilization import Utilization, log_peaks, utilization_of
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Experience
from step3_ppo.models import Models
from step3_ppo.update import Updates


@dataclass(frozen=True)
class UpdateUtilization:
    """What the updates on a rollout cost in seconds of all processes at their peak."""

    actor: Utilization

    critic: Utilization | None
    """None without a critic."""

    mesh: Mesh

    def metrics(
        self,
        experience: Experience,
        updates: Updates,
        config: PPOConfig,
        *,
        step: int,
        seconds: float,
    ) -> dict[str, float]:
        """`mfu_training` and `hfu_training`: shares of the peak over the phase of training.

        Counted are both passes over every response, once for each epoch; of a rollout whose own
        pass the first update backpropagates through, that update's backward pass alone. An epoch
        that `target_kl` ends counts by its minibatches. PPO-ptx's rows don't count.

        Args:
            experience: the responses, of this process.
            updates: made on them.
            config: settings of the step.
            step: the iteration.
            seconds: of the phase.
        """
        sequences = [(len(each), each.num_targets) for each in experience.sequences]
        learning = [self.actor] if config.trains_actor(step) else []
        learning += [] if self.critic is None else [self.critic]
        passes = updates.count / -(-config.rollout_size // config.batch_size)
        model = hardware = 0.0
        for each in learning:
            both = each.training(sequences)
            done = 0.0 if experience.forward is None else each.forward(sequences)
            model += passes * both.model - done
            hardware += passes * both.hardware - done
        model, hardware = self.mesh.data.sums([model, hardware])
        return {"mfu_training": model / seconds, "hfu_training": hardware / seconds}


def update_utilization(models: Models, config: PPOConfig, mesh: Mesh) -> UpdateUtilization:
    """Utilization of models as they are set up; all call it, the main process logs the peak."""
    peak = config.peak_tflops
    actor, critic = utilization_of(models.policy, peak_tflops=peak, mesh=mesh), None
    if models.critic is not None:
        critic = utilization_of(models.value_model, peak_tflops=peak, mesh=mesh)
    log_peaks(actor, *([] if critic is None else [critic]))
    return UpdateUtilization(actor, critic, mesh)
