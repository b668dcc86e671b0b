"""A task for tools: look numbers up, calculate with them, and submit the result."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any, override

from openreward.environments import Environment, Message, TextBlock, ToolOutput, tool
from openreward.environments.types import ToolCallBlock, ToolResultBlock
from pydantic import BaseModel, Field

PRICES: Mapping[str, int] = {
    "apple": 3,
    "bread": 4,
    "candle": 7,
    "drum": 26,
    "egg": 2,
    "fork": 5,
    "glove": 9,
    "hat": 12,
}
"""Prices of a shop in coins. The model can learn them only by searching."""

TASKS: Mapping[str, int] = {"train": 200, "test": 40}
FOUND_REWARD = 0.1
RIGHT_REWARD = 0.8

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Query(BaseModel):
    item: str = Field(description="the name of one thing, such as apple")


class Expression(BaseModel):
    expression: str = Field(description="whole numbers with +, - and *, such as 2 * 3 + 4")


class Submission(BaseModel):
    answer: int = Field(description="the price of everything")


class Lookup(Environment):
    def __init__(self, task_spec: Any = {}, secrets: Mapping[str, str] = {}) -> None:  # noqa: B006  the SDK's own form
        super().__init__(task_spec, dict(secrets))
        self.order: Mapping[str, int] = dict(task_spec)
        self.searched_items: set[str] = set()

    @classmethod
    @override
    def list_splits(cls) -> list[Any]:
        return list(TASKS)

    @classmethod
    @override
    async def num_tasks(cls, split: str) -> int:
        return TASKS[split]

    @classmethod
    @override
    async def get_task(cls, split: str, index: int) -> Any:
        return order(split, index)

    @classmethod
    @override
    def list_tasks(cls, split: str) -> list[Any]:
        return [order(split, index) for index in range(TASKS[split])]

    @override
    def get_messages(self) -> list[Any]:
        task_message = Message(role="user", blocks=[TextBlock(text=question(self.order))])
        return [*worked_example({"egg": 4}), task_message]

    @tool
    async def search(self, params: Query) -> ToolOutput:
        """The price of one thing."""
        item = params.item.strip().lower()
        if item not in PRICES:
            return ToolOutput(blocks=[TextBlock(text=f"nothing is known of {item!r}")])
        new = item in self.order and item not in self.searched_items
        self.searched_items.add(item)
        block = TextBlock(text=price_of(item))
        return ToolOutput(blocks=[block], reward=FOUND_REWARD if new else None)

    @tool
    async def calculate(self, params: Expression) -> ToolOutput:
        """The value of an expression."""
        try:
            text = str(value(ast.parse(params.expression, mode="eval").body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            text = "only whole numbers below a million, +, - and * are allowed"
        return ToolOutput(blocks=[TextBlock(text=text)])

    @tool
    async def submit(self, params: Submission) -> ToolOutput:
        """Say what everything costs. It ends the task."""
        right = params.answer == sum(PRICES[item] * count for item, count in self.order.items())
        block = TextBlock(text="right" if right else "wrong")
        return ToolOutput(blocks=[block], reward=RIGHT_REWARD if right else 0.0, finished=True)


def order(split: str, index: int) -> dict[str, int]:
    """Return the number of each item that a task asks for."""
    chance = random.Random(f"{split}/{index}")
    first, second = chance.sample(sorted(PRICES), 2)
    return {first: chance.randint(2, 5), second: chance.randint(2, 5)}


def question(asked_for: Mapping[str, int]) -> str:
    things = " and ".join(f"{count} {item}s" for item, count in asked_for.items())
    return f"What do {things} cost? Search the price of each, calculate, and submit."


def worked_example(asked_for: Mapping[str, int]) -> list[Message]:
    """Return a conversation that shows a small model the form of tool calls."""
    (item, count), *_ = asked_for.items()
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("search", {"item": item}, price_of(item)),
        ("submit", {"answer": count * PRICES[item]}, "right"),
    ]
    messages = [Message(role="user", blocks=[TextBlock(text=question(asked_for))])]
    for number, (name, arguments, result) in enumerate(calls):
        call = ToolCallBlock(id=f"example_{number}", name=name, input=arguments)
        block = ToolResultBlock(tool_call_id=call.id, blocks=[TextBlock(text=result)])
        messages += [Message(role="assistant", blocks=[call]), Message(role="user", blocks=[block])]
    return messages


def price_of(item: str) -> str:
    return f"One {item} costs {PRICES[item]} coins."


def value(node: ast.expr) -> int:
    """Evaluate an arithmetic expression.

    Raises:
        ValueError: the expression contains anything but whole numbers, +, - and *, or a number that is too large.
    """
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 10**6:
            return number
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            result = OPERATORS[type(sign)](value(left), value(right))
            if abs(result) < 10**6:
                return result
        case _:
            pass
    raise ValueError("not an expression")
