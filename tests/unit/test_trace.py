"""What tracing counts without memory, held against what autograd keeps of real tensors on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.recipe import ModelSection
from shoal.errors import ShoalError
from shoal.numerics.init import initialise
from shoal.train.build_model import build_model
from shoal.train.trace.model_trace import TracedBlock, blocks_of, load, trace, trace_samples, workload_of
from tests.cover import wide

# ---- five models that are no transformers ---------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride > 1 or width_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, width_in = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(width_in, width, stride if index == 0 else 1))
                width_in = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def double(width_in: int, width: int) -> nn.Module:
            one = nn.Conv2d(width_in, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()
            two = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()
            return nn.Sequential(*one, nn.Dropout(0.1), *two)

        self.down = nn.ModuleList([double(3, 16), double(16, 32), double(32, 64)])
        self.middle = double(64, 64)
        self.rise = nn.ModuleList([nn.ConvTranspose2d(64, width, 2, stride=2) for width in (64,)])
        self.up = nn.ModuleList([double(128, 32), double(64, 16), double(32, 16)])
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(down(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.rise[0](self.middle(x))
        for number, up in enumerate(self.up):
            x = up(torch.cat([x, kept.pop()], 1))
            if number < 2:
                x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.last(x)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 96)
        self.lstm = nn.LSTM(96, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_features = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_features(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        self.blocks = nn.Sequential(*(MixerBlock(49, 64) for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class MessagePassing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1))
        arrived = torch.zeros_like(nodes, dtype=messages.dtype).index_add(0, target, messages)
        return nodes + self.update(torch.cat([nodes, arrived], -1))


class Gnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(16, 32)
        self.layers = nn.ModuleList(MessagePassing(32) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.encode(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x.tanh())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "resnet50": (ResNet50, lambda: (torch.randn(1, 3, 64, 64),)),
    "unet": (UNet, lambda: (torch.randn(2, 3, 32, 32),)),
    "lstm": (Lstm, lambda: (torch.randint(500, (16, 150)),)),  # more tokens than the library is asked with
    "mixer": (Mixer, lambda: (torch.randn(4, 3, 56, 56),)),
    "gnn": (Gnn, lambda: (torch.randn(300, 16), torch.randint(300, (2, 1200)))),
}


def really_kept(model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype | None) -> int:
    """Bytes of the storages that autograd holds after a forward on real tensors, beside parameters, buffers, inputs."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    there = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *inputs)}
    autocast = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
        output = model(*inputs)
    assert output.requires_grad
    return sum(storage.nbytes() for place, storage in kept.items() if place not in there)


# In bfloat16 these two take most of a minute on a CPU, and their layers are in others: convolutions in the U-Net.
IN_BF16 = [wide(name, "bf16") if name in ("resnet50", "lstm") else (name, "bf16") for name in MODELS]


@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in MODELS), *IN_BF16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_saved_bytes_are_those_of_autograd(name: str, precision: str) -> None:
    build, make_inputs = MODELS[name]
    model, inputs = build(), make_inputs()
    traced = trace(model, inputs, precision=precision)
    try:
        kept = really_kept(model, inputs, torch.bfloat16 if precision == "bf16" else None)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("this CPU has no LSTM in bfloat16")
    assert sum(block.saved for block in traced) == pytest.approx(kept, rel=0.03)
    assert sum(block.parameters for block in traced) == sum(p.numel() for p in model.parameters())


def test_saved_bytes_of_a_transformer_with_blocks_that_it_describes() -> None:
    model = build_model(ModelSection.model_validate({"name": "llama", "num_layers": 3}))
    initialise(model, seed=0)
    tokens = torch.randint(200, (2, 64))
    traced = trace(model, tokens)
    assert sum(block.saved for block in traced) == really_kept(model, (tokens,), None)
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]
    assert [block.name for block in traced if block.name] == names
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    width = model.get_submodule("model.layers.0.self_attn.o_proj").weight.shape[1]
    attention = 3 * 2 * 64 * 64 / 2 * 4 * width  # layers x samples x pairs of tokens x two products
    assert sum(block.flops for block in traced) == 2 * 2 * 64 * matrices + attention


# ---- what is charged to whom ----------------------------------------------------------------------------------------


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def by_name(blocks: tuple[TracedBlock, ...]) -> dict[str, TracedBlock]:
    return {block.name: block for block in blocks}


def test_each_block_is_charged_what_it_does() -> None:
    found = by_name(trace(TwoLinears(), torch.empty(10, 8)))
    first, second, outside = found["first"], found["second"], found[""]
    assert (first.parameters, first.flops, first.output) == (8 * 16 + 16, 2 * 10 * 8 * 16, 4 * 10 * 16)
    assert (second.parameters, second.flops, second.output) == (16 * 4 + 4, 2 * 10 * 16 * 4, 4 * 10 * 4)
    assert first.saved == 0  # its input is the model's, and its weight is a parameter
    assert outside.saved == 4 * 10 * 16  # the relu's output, which the second layer saves too, and later
    assert second.saved == 0
    assert (outside.parameters, outside.flops) == (0, 0)
    assert outside.traffic == 2 * 4 * 10 * 16  # the relu reads and writes
    assert (first.kernels, second.kernels, outside.kernels) == (1, 1, 1)


def test_a_product_of_a_sequence_is_one_kernel_that_reads_nothing_else() -> None:
    (block,) = trace(nn.Sequential(nn.Linear(8, 4, bias=False)), torch.empty(2, 5, 8))
    assert (block.kernels, block.traffic) == (1, 0)


def test_a_storage_counts_once_and_whole() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.linear(x).chunk(2, dim=-1)
            return left[:, :1].exp() + left[:, :1] * right[:, :1]  # saves exp's output, and two views of one storage

    assert sum(block.saved for block in trace(Views(), torch.empty(10, 8))) == 4 * (10 * 8 + 10)


@pytest.mark.parametrize(
    ("model", "inputs", "flops"),
    [
        (nn.Conv2d(3, 5, 3, padding=1), torch.empty(2, 3, 8, 8), 2 * 2 * 8 * 8 * 5 * 3 * 9),
        (nn.LSTM(6, 10, batch_first=True), torch.empty(3, 7, 6), 2 * 3 * 7 * 4 * 10 * (6 + 10)),
    ],
    ids=["convolution", "lstm"],
)
def test_flops(model: nn.Module, inputs: Tensor, flops: float) -> None:
    assert sum(block.flops for block in trace(nn.Sequential(model), inputs)) == flops


@pytest.mark.parametrize("causal", [True, False])
def test_causal_attention_is_half_the_square(causal: bool) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    (outside,) = trace(Attends(), torch.empty(2, 4, 32, 16, requires_grad=True))
    assert outside.flops == 2 * 4 * 32 * 32 * (16 + 16) * 2 * (0.5 if causal else 1)


def test_per_sample_and_whatever_the_samples() -> None:
    model = TwoLinears()
    found = by_name(trace_samples(model, torch.empty(10, 8), precision="bf16"))
    first, second = found["first"], found["second"]
    assert (first.flops, second.flops) == (2 * 8 * 16, 2 * 16 * 4)
    assert first.saved == 2 * 8  # the input in bfloat16, which is not the model's own input any more
    # Only the second layer multiplies a gradient with its weight, so only that one's copy is kept.
    assert (first.saved_anyway, second.saved_anyway) == (0, 2 * 16 * 4)
    assert sum(b.saved * 10 + b.saved_anyway for b in found.values()) == sum(
        b.saved for b in trace(model, torch.empty(10, 8), precision="bf16")
    )


def test_a_workload_for_the_planner() -> None:
    model = TwoLinears()
    workload = workload_of(model, torch.empty(10, 8), name="two", precision="bf16")
    traced = trace_samples(model, torch.empty(10, 8), precision="bf16")
    assert workload.name == "two"
    assert workload.parameters == sum(p.numel() for p in model.parameters())
    assert [block.name for block in workload.blocks] == [block.name for block in traced]
    assert [b.saved for b in workload.blocks] == [b.saved for b in traced]
    assert [b.saved_anyway for b in workload.blocks] == [0, 2 * 16 * 4, 0]
    assert workload.flops_per_token(1) == 3 * 2 * (8 * 16 + 16 * 4)


# ---- which blocks ---------------------------------------------------------------------------------------------------


def test_blocks_are_elements_of_lists_of_likes() -> None:
    resnet = [f"stages.{stage}.{i}" for stage, depth in enumerate((3, 4, 6, 3)) for i in range(depth)]
    assert list(blocks_of(ResNet50())) == ["conv1", "bn1", "pool", *resnet, "fc"]
    assert list(blocks_of(Mixer())) == ["patches", *(f"blocks.{i}" for i in range(4)), "head"]
    assert list(blocks_of(Lstm())) == ["embedding", "lstm", "head"]
    assert list(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "1", "2"]


def test_a_list_inside_a_block_does_not_cut_it() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    layers = nn.Module()
    layers.layers = nn.ModuleList(Experts() for _ in range(2))
    wrapper = nn.Module()
    wrapper.model, wrapper.head = layers, nn.Linear(4, 4)
    assert list(blocks_of(wrapper)) == ["model.layers.0", "model.layers.1", "head"]


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    found = by_name(trace(Tied(), torch.zeros(2, 3, dtype=torch.int64)))
    assert (found["embedding"].parameters, found["head"].parameters) == (48, 0)
    assert found["head"].saved == 4 * 2 * 3 * 4  # its input; its weight is a parameter, by either name


def test_frozen_parameters_are_not_trained_and_a_block_that_never_runs_is_there() -> None:
    model = TwoLinears()
    model.first.requires_grad_(False)
    model.unused = nn.Linear(3, 3)
    found = by_name(trace(model, torch.empty(10, 8)))
    assert (found["first"].parameters, found["first"].trained) == (144, 0)
    assert (found["unused"].parameters, found["unused"].flops) == (12, 0)


# ---- without memory, and without a trace ----------------------------------------------------------------------------


def test_a_model_larger_than_any_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.ReLU())  # 4 TiB
    blocks = trace(model, torch.empty(2**20, 2**20, device="meta"))
    assert blocks[0].parameters == 2**40
    assert blocks[0].flops == 2 * 2.0**60


def test_the_model_stays_as_it_is() -> None:
    model, before = Mixer(), Mixer()
    before.load_state_dict(model.state_dict())
    tensors = list(model.parameters())
    trace(model, torch.randn(2, 3, 56, 56), precision="bf16")
    assert all(now is then for now, then in zip(model.parameters(), tensors, strict=True))
    for (name, now), then in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(now, then), name
    assert all(parameter.grad is None for parameter in tensors)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_dropout_of_a_model_that_is_not_trained_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    inputs = torch.empty(8, 4)
    assert sum(block.saved for block in trace(model, inputs)) == 4 * 8 * 4
    assert sum(block.saved for block in trace(model.eval(), inputs)) == 0


# ---- from a file ----------------------------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn

def large():
    return nn.Linear(2**14, 2**14), torch.empty(2**14, 2**14)

def curious():
    rates = torch.linspace(0, 0.1, 3).tolist()
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates)), torch.empty(4, 4, requires_grad=True)

def tokens():
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

def images():
    return nn.Conv2d(3, 4, 3)

def number():
    return 3

def fails():
    raise KeyError("width")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "models_to_trace.py").write_text(FILE)
    return str(tmp_path / "models_to_trace.py")


def test_load_takes_no_memory(file: str) -> None:
    before = resident()
    model, inputs = load(f"{file}:large")
    assert sum(block.parameters for block in trace(nn.Sequential(model), inputs)) == 2**28 + 2**14
    assert resident() - before < 2**28  # the weight alone would be 2**30


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_load_of_a_model_that_looks_at_values_while_it_is_built(file: str) -> None:
    model, inputs = load(f"{file}:curious")
    assert len(trace(model, inputs)) == 3


def test_tokens_need_not_be_said(file: str) -> None:
    model, inputs = load(f"{file}:tokens", sequence=16, batch=2)
    assert by_name(trace(model, inputs))["1"].flops == 2 * 2 * 16 * 4 * 10


@pytest.mark.parametrize(
    ("function", "what", "fix"),
    [
        ("images", "must return the inputs of its model's forward", "return model, inputs"),
        ("number", "returned int, not an nn.Module", "return the model"),
        ("fails", "failed: KeyError: 'width'", "returns a model"),
        ("tokken", "no function 'tokken'", "tokens"),
    ],
)
def test_what_cannot_be_loaded(file: str, function: str, what: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        load(f"{file}:{function}", sequence=16)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert fix in problem.fix


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.inner(x))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: trace(LooksAtValues(), torch.empty(2, 4)), "reads the values of a tensor in gate"),
        (lambda: trace(TwoLinears(), torch.empty(2, 9)), "cannot be run on these inputs in first: RuntimeError"),
        (lambda: trace(TwoLinears(), torch.empty(2, 8), device="tpu"), "device must be cpu or cuda, got 'tpu'"),
        (lambda: trace(TwoLinears(), torch.empty(2, 8), precision="fp31"), "got 'fp31'"),
        (lambda: trace_samples(TwoLinears(), {}), "the inputs must have at least one sample"),
    ],
)
def test_what_cannot_be_traced(call: Callable[[], Any], what: str) -> None:
    with pytest.raises(ShoalError) as caught:
        call()
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.fix
