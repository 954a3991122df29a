"""The pipelines that `benchmarks.pipeline` compares, each as one function that trains one step.

All take the same rows, sum the loss over the same tokens, clip the gradient's norm to 1 and run
AdamW in fp32. PyTorch's stages are made as its users make them: modules of some layers, and rows
filled up to one length, for its runtime takes micro-batches of one shape alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import OptimConfig, ParallelConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch, micro_batches
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from pipeline.models.passes import Passes, passes_of
from pipeline.next_token import next_token_nll
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.schedules import Schedule

Step = Callable[[], None]

LR = 1e-4
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
IGNORED = -100
VOCABULARY = 2_048
CHUNKS = 2
MICRO_BATCHES = 8

OURS: dict[str, Schedule] = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved"}
TORCH = "torch 1f1b"


def build_model() -> nn.Module:
    """A Llama of 27.4M fp32 parameters in 8 blocks: hidden 512, vocabulary 2,048, untied.

    Its head is a third of a block, so that two stages of four blocks take about as long.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def ours(mesh: Mesh, rows: Sequence[Tensor], schedule: Schedule) -> tuple[Step, Passes]:
    """The project's own, over micro-batches of packed rows."""
    optim = OptimConfig(
        lr=LR, betas=BETAS, max_grad_norm=MAX_NORM, schedule="constant", warmup_ratio=0.0
    )
    settings = TrainedModelConfig(path="", optim=optim, precision="fp32")
    chunks = CHUNKS if schedule == "interleaved" else 1
    blocks = 8 // (mesh.stages.size * chunks)
    parallel = ParallelConfig(
        pp=mesh.stages.size,
        tp=mesh.tensor.size,
        schedule=schedule,
        chunks=chunks,
        partition=(blocks,) * (mesh.stages.size * chunks),
    )
    model = build_model()
    cast("Any", model).set_attn_implementation(RAGGED)
    passes = passes_of(
        model, settings, parallel, mesh, Policy, total_steps=1000, name=f"engine {schedule}"
    )
    longest = max(len(row) for row in rows)
    parts = micro_batches(
        [len(row) for row in rows],
        max_tokens=-(-len(rows) // MICRO_BATCHES) * longest,
        num_processes=1,
        process=0,
        at_least=MICRO_BATCHES,
    )
    batches = [packed([rows[index] for index in part]) for part in parts]
    targets = sum(len(row) - 1 for row in rows)
    engine = passes.engine

    def loss_of(batch: TokenBatch) -> Tensor:
        return next_token_nll(engine(batch, uniform=True).logprobs)

    def step() -> None:
        passes.learn(batches, loss_of, divisor=targets)
        engine.step()

    return step, passes


def packed(rows: Sequence[Tensor]) -> TokenBatch:
    """Rows whose tokens are all learned, but for the first of each."""
    learned = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    lengths = tuple(len(row) for row in rows)
    return TokenBatch(torch.cat(list(rows)), lengths, learned.nonzero().squeeze(-1))


class TorchStage(nn.Module):
    """Some layers of a Llama, from token ids or hidden states to hidden states or logits."""

    def __init__(self, model: Any, *, stage: int, stages: int) -> None:  # noqa: ANN401
        super().__init__()
        inner, each = model.model, 8 // stages
        self.embed = inner.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleList(inner.layers[stage * each : (stage + 1) * each])
        self.rotary = inner.rotary_emb
        is_last = stage == stages - 1
        self.norm = inner.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Of rows of one length."""
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotary)
        if self.norm is None or self.head is None:
            return hidden
        return self.head(self.norm(hidden))


def torchs(mesh: Mesh, rows: Sequence[Tensor]) -> Step:
    """`Schedule1F1B` of torch.distributed.pipelining; layers divided by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    shape = (mesh.stages.size, mesh.tensor.size)
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))
    number, count = mesh.stages.rank, mesh.stages.size
    module = TorchStage(build_model(), stage=number, stages=count)
    if mesh.tensor.size > 1:
        _divide(module, device_mesh["tp"])
    longest = max(len(row) for row in rows)
    targets = sum(len(row) - 1 for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORED)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
        labels[at, : len(row) - 1] = row[1:]

    def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, wanted.flatten(), reduction="sum") / targets

    stage = PipelineStage(
        module, number, count, torch.device("cpu"), group=device_mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    params = [param for param in module.parameters() if param.requires_grad]
    kinds: dict[type, list[Tensor]] = {}  # of which an optimizer takes one at a time
    for param in params:
        kinds.setdefault(type(param.data), []).append(param)
    optimizers = [
        torch.optim.AdamW(each, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
        for each in kinds.values()
    ]

    def step() -> None:
        if number == 0:
            schedule.step(ids)
        elif number == count - 1:
            schedule.step(target=labels, losses=[])
        else:
            schedule.step()
        _clip(params, device_mesh["pp"].get_group())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _divide(module: TorchStage, tensor: Any) -> None:  # noqa: ANN401
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    by_outputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    by_outputs += ("mlp.gate_proj", "mlp.up_proj")
    for layer in module.layers:
        plan = {name: ColwiseParallel() for name in by_outputs}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, tensor, plan)


def _clip(params: Sequence[Tensor], stages: dist.ProcessGroup) -> None:
    """To the norm of all stages."""
    from torch.distributed.tensor import DTensor

    squares = torch.zeros(())
    for param in params:
        assert param.grad is not None
        norm = torch.linalg.vector_norm(param.grad)
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    dist.all_reduce(squares, group=stages)
    factor = torch.clamp(MAX_NORM / (squares.sqrt() + 1e-6), max=1.0).item()
    for param in params:
        assert param.grad is not None
        param.grad.mul_(factor)
