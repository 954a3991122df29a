"""What a kernel is asked on a GPU, once in a process, before it is trusted.

Answers are compared with the definition's on the CPU, in float64 where it rounds.
"""

from collections.abc import Callable, Mapping

import torch

from pipeline.errors import KernelError
from pipeline.kernels import append_reference, decode_reference, reference, sampling_reference
from pipeline.kernels.cuda import adam, append, decode, sample
from pipeline.kernels.cuda.driver import LaunchError
from pipeline.kernels.cuda.gpu import DTYPES, Gpu
from pipeline.kernels.decode_reference import Scores
from pipeline.kernels.reference import AdamW, Weights
from pipeline.kernels.sampling_reference import Draw

Macros = Mapping[str, str | int]

NUMBERS = {name: dtype for dtype, name in DTYPES.items()}

ATTENTION_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the norm: a few times what rounding makes, far less than a fault does."""

LOGPROB_ERROR = 1e-4
"""In nats, at scores below 16."""


def is_right(gpu: Gpu, source: str, defines: Macros) -> bool:
    """Whether the kernel of a source with these macros computes on this GPU what it is defined as.

    It waits for the GPU, so it can't be part of a CUDA graph.

    Raises:
        KernelError: the driver does not start the kernel.
    """
    try:
        right = CASES[source](gpu, defines)
    except LaunchError as error:
        raise KernelError(str(error)) from error
    if not right:  # what was kept of it may be to blame
        gpu.forget(source, defines)
    return right


def attention(gpu: Gpu, defines: Macros) -> bool:
    """Two sequences, whole and cut into two parts; what must not be read is NaN."""
    dtype = NUMBERS[str(defines["NUMBER"])]
    size, heads = int(defines["HEAD_SIZE"]), int(defines["GROUP"])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 37], dtype=torch.int32)
    scaling = size**-0.5
    query = torch.randn(2, heads, size, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 1, 40, size, generator=generator).to(dtype)
    for row, length in enumerate(lengths.tolist()):
        key[row, :, length:] = value[row, :, length:] = torch.nan
    scores = Scores(lengths=lengths, scaling=scaling)
    expected = decode_reference.decode_attention(
        query.double(), key.double(), value.double(), scores
    )
    query, key, value = (each.to(gpu.device) for each in (query, key, value))
    scores = Scores(lengths=lengths.to(gpu.device), scaling=scaling)
    outs = [
        decode.decode_attention(
            query, key, value, scores, gpu=gpu, longest=40, num_splits=num_splits
        )
        for num_splits in (1, 2)
    ]
    errors = [float((out.cpu().double() - expected).norm() / expected.norm()) for out in outs]
    return all(error <= ATTENTION_ERROR[dtype] for error in errors)  # of NaN it is not


def appended(gpu: Gpu, defines: Macros) -> bool:
    """Three tokens, one of them in no slot; keys and values of two sizes."""
    del defines  # one kernel takes all
    keys, values = (torch.zeros(2, 2, 8, size) for size in (64, 32))
    generator = torch.Generator().manual_seed(0)
    new = tuple(torch.randn(2, 3, size, generator=generator) for size in (64, 32))
    places = torch.tensor([9, 16, 0])
    there = keys.to(gpu.device, copy=True), values.to(gpu.device, copy=True)
    states = new[0].to(gpu.device), new[1].to(gpu.device)
    append.append_(there, states, places.to(gpu.device), gpu=gpu)
    append_reference.append_((keys, values), (new[0], new[1]), places)
    return torch.equal(there[0].cpu(), keys) and torch.equal(there[1].cpu(), values)


def drawn(gpu: Gpu, defines: Macros) -> bool:
    """Tokens of four sequences, the likeliest and by chance."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 300, generator=generator)
    logits = logits.to(NUMBERS[str(defines["NUMBER"])])
    numbers = torch.arange(8).view(2, 4)
    there = numbers.to(gpu.device)
    for draw in (
        Draw(seed=1, temperature=0.0),
        Draw(seed=1, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    ):
        tokens, logprobs = sample.sample(logits.to(gpu.device), there[0], there[1], draw, gpu=gpu)
        expected = sampling_reference.sample(logits, numbers[0], numbers[1], draw)
        near = torch.allclose(logprobs.cpu(), expected[1], rtol=0, atol=LOGPROB_ERROR)
        if not near or not torch.equal(tokens.cpu(), expected[0]):
            return False
    return True


def stepped(gpu: Gpu, defines: Macros) -> bool:
    """Two steps of a vector with a tail, to the bit."""
    dtypes = {name: NUMBERS[str(defines[name])] for name in ("GRADIENT", "MOMENT", "COPY")}
    generator = torch.Generator().manual_seed(0)
    gradient, master, exp_avg, square = torch.randn(4, 301, generator=generator)
    low_bits = None
    if defines["SPLIT"]:
        master, low_bits = reference.split_master(master)
    weights = Weights(
        master=master,
        exp_avg=exp_avg.to(dtypes["MOMENT"]),
        exp_avg_sq=square.square().to(dtypes["MOMENT"]),
        copy=torch.zeros(301, dtype=dtypes["COPY"]) if defines["HAS_COPY"] else None,
        low_bits=low_bits,
    )
    gradient = gradient.to(dtypes["GRADIENT"])
    there = Weights(
        **{name: each.to(gpu.device, copy=True) for name, each in weights.tensors().items()}
    )
    for number in (1, 2):
        step = AdamW(
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            step=number,
            multiplier=0.5,
        )
        adam.run(gpu, there, gradient.to(gpu.device), step)
        reference.adamw_(weights, gradient, step)
    ours = there.tensors()
    return all(torch.equal(ours[name].cpu(), each) for name, each in weights.tensors().items())


CASES: Mapping[str, Callable[[Gpu, Macros], bool]] = {
    "adamw": stepped,
    "decode_attention": attention,
    "append": appended,
    "sample": drawn,
}
"""By source."""
