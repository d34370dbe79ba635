"""Models that people plan for, by name: dimensions as published in their reports or their config.json."""

from __future__ import annotations

from pathlib import Path

from shoal.config.pretrained_folder import CONFIG, PREFIX, folder_of
from shoal.errors import ShoalError, nearest
from shoal.predict.huggingface_config import workload_from_config
from shoal.predict.workload import Block, Latent, Workload


def _llama(name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: int | bool) -> Workload:
    dimensions = {"vocabulary": 128256, "sequence": 8192, **more}
    return Workload(name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, **dimensions)  # type: ignore[arg-type]


def _gpt3(name: str, hidden: int, layers: int, heads: int) -> Workload:
    """Brown et al. 2020, table 2.1. Its vocabulary of 50257 is filled up to a multiple of 128, as everybody does."""
    return Workload(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=4 * hidden,
        gated=False,
        vocabulary=50304,
        tied=True,
        biases=True,
        positions=2048,
        sequence=2048,
    )


def _qwen3(name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False) -> Workload:
    return _llama(
        name, hidden, layers, heads, kv_heads, ffn, head_dim=128, vocabulary=151936, sequence=32768, tied=tied
    )


def _resnet(name: str, depths: tuple[int, int, int, int]) -> Workload:
    """Bottleneck ResNets on images of 224 × 224 (He et al. 2015); bytes of a sample are fp32."""
    stem = Block(name="stem", parameters=9408 + 128, flops=236e6, saved=4 * (3 * 224**2 + 2 * 64 * 112**2 + 64 * 56**2))
    blocks = [stem]
    inside = 64
    for stage, depth in enumerate(depths):
        width, size = 64 * 2**stage, 56 // 2**stage
        for number in range(depth):
            entry = size * (2 if number == 0 and stage else 1)  # the first block of a stage halves the picture
            shortcut = number == 0
            matrices = inside * width + 9 * width * width + width * 4 * width + shortcut * inside * 4 * width
            area, before = size * size, entry * entry
            flops = 2 * (inside * width * before + (9 * width**2 + 4 * width**2 + shortcut * 4 * inside * width) * area)
            kept = 2 * width * before + 2 * width * area + (3 if shortcut else 2) * 4 * width * area
            blocks.append(
                Block(
                    name=f"stage{stage + 1}.{number}",
                    parameters=matrices + 2 * (2 * width + 4 * width * (1 + shortcut)),
                    flops=float(flops),
                    saved=4.0 * kept,
                    output=4.0 * 4 * width * area,
                    traffic=4.0 * 2 * kept,
                    kernels=10,
                )
            )
            inside = 4 * width
    blocks.append(Block(name="head", parameters=2048 * 1000 + 1000, flops=2 * 2048e3, saved=4 * 2048.0))
    return Workload(name=name, blocks=tuple(blocks))


_MODELS = (
    # Touvron et al. 2023 (Llama 2), Grattafiori et al. 2024 (Llama 3), Meta's config.json (Llama 3.2)
    _llama("llama2-7b", 4096, 32, 32, 32, 11008, vocabulary=32000, sequence=4096),
    _llama("llama2-13b", 5120, 40, 40, 40, 13824, vocabulary=32000, sequence=4096),
    _llama("llama2-70b", 8192, 80, 64, 8, 28672, vocabulary=32000, sequence=4096),
    _llama("llama3-1b", 2048, 16, 32, 8, 8192, tied=True),
    _llama("llama3-3b", 3072, 28, 24, 8, 8192, tied=True),
    _llama("llama3-8b", 4096, 32, 32, 8, 14336),
    _llama("llama3-70b", 8192, 80, 64, 8, 28672),
    _llama("llama3-405b", 16384, 126, 128, 8, 53248),
    _gpt3("gpt3-125m", 768, 12, 12),
    _gpt3("gpt3-350m", 1024, 24, 16),
    _gpt3("gpt3-1.3b", 2048, 24, 16),
    _gpt3("gpt3-6.7b", 4096, 32, 32),
    _gpt3("gpt3-13b", 5120, 40, 40),
    _gpt3("gpt3-175b", 12288, 96, 96),
    # Jiang et al. 2023 and 2024
    _llama("mistral-7b", 4096, 32, 32, 8, 14336, vocabulary=32000, window=4096),
    _llama("mixtral-8x7b", 4096, 32, 32, 8, 14336, vocabulary=32000, experts=8, top_k=2, sequence=4096),
    _llama("mixtral-8x22b", 6144, 56, 48, 8, 16384, vocabulary=32768, experts=8, top_k=2, sequence=4096),
    # Qwen 2.5 and 3: config.json of their releases
    _llama("qwen2.5-7b", 3584, 28, 28, 4, 18944, vocabulary=152064, sequence=32768),
    _llama("qwen2.5-72b", 8192, 80, 64, 8, 29568, vocabulary=152064, sequence=32768),
    _qwen3("qwen3-0.6b", 1024, 28, 16, 8, 3072, tied=True),
    _qwen3("qwen3-8b", 4096, 36, 32, 8, 12288),
    _qwen3("qwen3-14b", 5120, 40, 40, 8, 17408),
    _qwen3("qwen3-32b", 5120, 64, 64, 8, 25600),
    _qwen3("qwen3-30b-a3b", 2048, 48, 32, 4, 6144).resized(experts=128, top_k=8, expert_ffn=768),
    _qwen3("qwen3-235b-a22b", 4096, 94, 64, 4, 12288).resized(experts=128, top_k=8, expert_ffn=1536),
    # OpenAI 2025
    _llama("gpt-oss-20b", 2880, 24, 64, 8, 2880, head_dim=64, vocabulary=201088, experts=32, top_k=4),
    _llama("gpt-oss-120b", 2880, 36, 64, 8, 2880, head_dim=64, vocabulary=201088, experts=128, top_k=4),
    # DeepSeek-AI 2024
    Workload(
        name="deepseek-v3",
        hidden=7168,
        layers=61,
        heads=128,
        head_dim=128,
        ffn=18432,
        vocabulary=129280,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        latent=Latent(query_rank=1536, key_rank=512, rope_dim=64, value_dim=128),
        sequence=4096,
    ),
    Workload(
        name="deepseek-v2-lite",
        hidden=2048,
        layers=27,
        heads=16,
        head_dim=128,
        ffn=10944,
        vocabulary=102400,
        experts=64,
        top_k=6,
        expert_ffn=1408,
        shared_ffn=2816,
        dense_layers=1,
        latent=Latent(query_rank=0, key_rank=512, rope_dim=64, value_dim=128),
        sequence=4096,
    ),
    _resnet("resnet50", (3, 4, 6, 3)),
    _resnet("resnet101", (3, 4, 23, 3)),
    _resnet("resnet152", (3, 8, 36, 3)),
)

MODELS = {model.name: model for model in _MODELS}
"""Name → what the planner knows of it."""


def find_model(what: str) -> Workload:
    """By the name of a preset, the path of a Hugging Face config.json, or `hf:FOLDER`."""
    if what in MODELS:
        return MODELS[what]
    if what.startswith(PREFIX):
        return workload_from_config(folder_of(what) / CONFIG)
    if what.endswith(".json"):
        return workload_from_config(Path(what))
    near = nearest(what.lower(), MODELS)
    if Path(what, CONFIG).is_file():
        near = f"{PREFIX}{what}"
    fix = near or f"one of {', '.join(MODELS)}; a config.json; hf:FOLDER; plain dimensions; or file.py:function"
    raise ShoalError(f"there is no model {what!r}", fix=fix, code="Q023")
