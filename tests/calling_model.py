"""Small models that know the turns of one agent by heart, so that real clients call tools on the embedded engine.

The turns come from a rollout with scripted replies. A model of one layer is trained on them with torch, in seconds, and
then runs on the engine like any other.

Prompts of an agent differ between rollouts, in paths, times, ids and lengths, so the model must not depend on them:
biases of its attention make it see little that is far away, and it is taught with other tokens in all places but the
last ones of each prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rlkit
from rlkit.chat.renderers import TemplateChat
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.store.history import load_history
from rlkit.testing import ScriptedSampler, tiny_model
from rlkit.tools.audit import audit
from rlkit.types import Sampling, Tokens, Turn

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

Author = Callable[..., str]
"""Return the reply to a prompt, given as the prompt and `seed`."""

Play = Callable[[RecordingPolicy], object]
"""Play a rollout with a policy."""

NEAR_TOKENS = 24
"""Number of tokens before a reply that always stay while the model learns; the others are exchanged in many steps."""

TAUGHT_TOKENS = 256
"""Number of tokens before a reply that the model is taught with, for it sees no others."""

NEARNESS_NATS = 6.0
"""What each frequency of `NEAR_FREQUENCIES` adds to the attention's score of the nearest token, before teaching.

The score falls by 5 at a distance of 60 tokens, by 11 at 100, and by at least 24 from 300 on.
"""

NEAR_FREQUENCIES = slice(7, 16)
"""The rotary frequencies of 32 dimensions whose cosines make up this score; their waves are longer than 350 tokens."""

MAX_STEPS = 500
EXCESS_NATS = 0.03
"""How much worse than the best a model may be that knows an episode, as the sum over all tokens of its replies."""

SUCCESSES = 20
"""Number of steps in a row for which it must know them, because each step exchanges other tokens."""


def write_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def teach_agent(path: Path, play: Play, authors: Sequence[Author]) -> Path:
    """Write a model that has learnt what each author replies in a rollout; equal prompts get each of their replies."""
    from transformers import AutoTokenizer

    make_model(path)
    chat = TemplateChat(AutoTokenizer.from_pretrained(path))

    def collect_turns(author: Author) -> Sequence[Turn]:
        sampler = ScriptedSampler(author, chat=chat)
        policy = RecordingPolicy(
            sampler=lambda: sampler,
            chat=chat,
            sampling=Sampling(max_tokens=200),
            seed=lambda turn: turn,
            limits=Limits(),
        )
        play(policy)
        return policy.turns

    teach(path, [collect_turns(author) for author in authors])
    return path


def train_agent(
    model: Path,
    envs: Sequence[rlkit.Env],
    *,
    steps: int,
    group_size: int,
    learning_rate: float,
    calls: int = 2,
    complete: float = 0.5,
    rollouts: Mapping[str, Any] = {},
) -> Sequence[float]:
    """Train a model that knows an agent on the engine, check the record, and return the mean reward of each step.

    Each rollout with all its calls is one conversation, and each sampled token is trained exactly once.

    Args:
        complete: least share of the rollouts of the first step that make all calls; a model may learn to make fewer.
    """
    result = rlkit.train(
        envs=envs,
        model=str(model),
        steps=steps,
        batch={"groups": 1, "group_size": group_size},
        sampling={"max_tokens": 100},
        optimizer={"learning_rate": learning_rate},
        rollouts=rollouts,
        trackers=[],
    )
    history = load_history(result.directory)
    groups = [member.group for step in range(1, steps + 1) for member in history.groups(step)]
    parents = [[turn.parent for turn in episode.turns] for episode in groups[0].episodes]
    assert sum(each == [None, *range(calls)] for each in parents) >= complete * len(parents), parents
    (report,) = asyncio.run(audit(result.directory)).values()
    assert report.mismatch is None
    graded = [[episode for episode in group.episodes if episode.reward is not None] for group in groups]
    rewards = [[episode.reward for episode in episodes] for episodes in graded]
    assert any(len(set(values)) > 1 for values in rewards), f"equal rewards teach nothing: {rewards}"
    turns = [turn for episodes in graded for episode in episodes for turn in episode.turns]
    assert report.tokens == sum(len(turn.completion) for turn in turns)
    return [float(np.mean(values)) for values in rewards]


def check_training(model: Path, env: rlkit.Env) -> None:
    """Train a model whose reward is 1 in half of its rollouts for two steps."""
    train_agent(model, [env], steps=2, group_size=8, learning_rate=0.0015)


def check_learning(model: Path, env: rlkit.Env) -> None:
    """Train a model whose reward is 1 in half of its rollouts, and check that its rewards rise.

    Three steps are compared with three, because a mean of 24 rollouts has a standard error of 0.1. They may be any
    three in a row: at this learning rate, which shows a rise within 8 steps, a late step may go too far.
    """
    means = train_agent(model, [env], steps=8, group_size=24, learning_rate=0.0015)
    windows = [float(np.mean(means[start : start + 3])) for start in range(len(means) - 2)]
    assert max(windows[3:]) > windows[0] + 0.15, f"the model does not learn: {means}"


def train_program(path: Path, agent: str, *, tool: str, argument: str, shown: Path, steps: int) -> None:
    """Train the model of a command-line agent, given as a shell script, that runs commands with a tool.

    The agent reads a file, and moves it to one of two places, of which one is right.

    Args:
        shown: folder of the host that the sandbox shows, with the program.
    """
    env = rlkit.ProcessEnv(
        argv=["./agent.sh"],
        files={"agent.sh": agent, "notes": "apples\n", "more": "tomatoes\n"},
        grade=lambda result: float((result.folder / "a").is_file()),
        host_folders=[str(shown)],
    )

    def write_reply(prompt: str, *, seed: int, name: str) -> str:
        if "apples" not in prompt:
            return write_call(tool, **{argument: "cat notes"})
        if "tomatoes" not in prompt:
            return write_call(tool, **{argument: f"mv notes {name}; cat more"})
        return "Done."

    authors = [partial(write_reply, name=name) for name in ("a", "b")]
    model = teach_agent(path, lambda policy: asyncio.run(env.rollout(policy)), authors)
    train_agent(model, [env], steps=steps, group_size=4, learning_rate=0.0005)


def make_model(path: Path) -> Path:
    """Write a random Llama of one layer for long prompts, with the template of `tiny_model`.

    The attention of each head prefers near tokens, by equal biases of queries and keys.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tiny_model(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 65_536, "attention_bias": True}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text()) | {"model_max_length": 65_536}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    weights = load_file(path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers." not in name or ".layers.0." in name}
    width, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    nearness = torch.zeros(width)
    nearness[NEAR_FREQUENCIES] = (NEARNESS_NATS * width**0.5) ** 0.5
    biases = {"q": nearness.repeat(heads), "k": nearness.repeat(groups), "v": torch.zeros(groups * width)}
    biases["o"] = torch.zeros(config["hidden_size"])
    kept |= {f"model.layers.0.self_attn.{name}_proj.bias": bias for name, bias in biases.items()}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


def teach(path: Path, episodes: Sequence[Sequence[Turn]]) -> None:
    """Train the model in a folder until it samples the turns of the episodes."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    weights = {name: value.requires_grad_() for name, value in load_file(path / "model.safetensors").items()}
    histories = [tuple(turn.completion.tobytes() for turn in turns) for turns in episodes]
    # Prompts with equal replies before them differ in times and ids, from which the model must not learn its reply.
    # One of them stands for all, and its replies are taught behind the same exchanged tokens.
    prompts, pairs = dict[tuple[bytes, ...], Tokens](), list[tuple[tuple[bytes, ...], Tokens]]()
    for turns, history in zip(episodes, histories, strict=True):
        for number, turn in enumerate(turns):
            prompts.setdefault(history[:number], join_prompt(turns, turn))
            pairs.append((history[:number], turn.completion))
    counts = Counter(history[:length] for history in histories for length in range(len(history) + 1))
    best = sum(
        math.log(counts[history[:n]] / counts[history[: n + 1]]) for history in histories for n in range(len(history))
    )
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.0)
    generator, successes = torch.Generator().manual_seed(0), 0
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(MAX_STEPS):
        seen = {key: exchange_tokens(prompt, config["vocab_size"], generator) for key, prompt in prompts.items()}
        losses = [measure_loss(weights, config, seen[key], torch.tensor(reply).long()) for key, reply in pairs]
        total = torch.stack(losses).sum()
        successes = successes + 1 if total.item() - best < EXCESS_NATS * len(episodes) else 0
        if successes == SUCCESSES:
            break
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
    else:
        raise AssertionError(f"the model has not learnt the turns: loss {total.item()}, at best {best}")
    save_file({name: value.detach() for name, value in weights.items()}, path / "model.safetensors")


def join_prompt(turns: Sequence[Turn], turn: Turn) -> Tokens:
    """Return all tokens before a reply; a turn that extends an earlier one has only what it adds."""
    if turn.parent is None:
        return turn.prompt.tokens
    parent = turns[turn.parent]
    return np.concatenate([join_prompt(turns, parent), parent.completion, turn.prompt.tokens])


def exchange_tokens(prompt: Tokens, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Return the end of a prompt with a random share of its tokens exchanged, except for the last ones."""
    import torch

    tokens = torch.tensor(prompt[-TAUGHT_TOKENS:]).long()
    exchanged = torch.rand(len(tokens), generator=generator) < torch.rand((), generator=generator)
    exchanged[-NEAR_TOKENS:] = False
    return torch.where(exchanged, torch.randint(vocabulary, (len(tokens),), generator=generator), tokens)


def measure_loss(weights: Weights, config: dict[str, float], prompt: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
    """Return the sum of the negative log-probabilities of a reply.

    Only the positions of the reply are computed behind the keys and values.
    """
    import torch
    from torch.nn import functional

    tokens = torch.cat([prompt, reply[:-1]])
    width, heads, groups = (
        int(config["head_dim"]),
        int(config["num_attention_heads"]),
        int(config["num_key_value_heads"]),
    )

    def norm(states: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        return states * scale * weights[f"model.{name}.weight"]

    def project(states: torch.Tensor, name: str) -> torch.Tensor:
        layer = f"model.layers.0.{name}"
        return functional.linear(states, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))

    def rotate(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = (positions[:, None] * frequencies).repeat(1, 2)
        turned = torch.cat([-states[..., width // 2 :], states[..., : width // 2]], -1)
        return states * angles.cos() + turned * angles.sin()

    states = weights["model.embed_tokens.weight"][tokens]
    normed, start = norm(states, "layers.0.input_layernorm"), len(tokens) - len(reply)
    positions = torch.arange(len(tokens))
    queries = rotate(
        project(normed[start:], "self_attn.q_proj").view(-1, heads, width).transpose(0, 1), positions[start:]
    )
    keys = rotate(project(normed, "self_attn.k_proj").view(-1, groups, width).transpose(0, 1), positions)
    values = project(normed, "self_attn.v_proj").view(-1, groups, width).transpose(0, 1)
    mask = positions[None, :] <= positions[start:, None]
    attended = functional.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(heads // groups, 0),
        values.repeat_interleave(heads // groups, 0),
        attn_mask=mask,
    )
    states = states[start:] + project(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
    normed = norm(states, "layers.0.post_attention_layernorm")
    gate = functional.silu(project(normed, "mlp.gate_proj"))
    states = states + project(gate * project(normed, "mlp.up_proj"), "mlp.down_proj")
    logits = functional.linear(norm(states, "norm"), weights["model.embed_tokens.weight"])
    return functional.cross_entropy(logits, reply, reduction="sum")
