"""Conversations of several turns, as HTTP clients have them, in words of the tiny Llama."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from examples.tiny_llama import WORDS, prompt
from tests.long.routers.questions import ANSWER_FOLLOWS, Answer, Question, ask

IDS = {word: token for token, word in enumerate(WORDS)}


class Chat:
    """One client's conversation, of which every turn is sent as a whole.

    Attributes:
        asked: The prompt of every turn so far, in tokens.
        answers: The answer to each of them.
    """

    def __init__(self, number: int, *, stream: bool) -> None:
        self.id = f"conversation-{number}"
        self.asked: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._number = number
        self._stream = stream
        self._messages: list[list[int]] = []  # of the user and of the assistant, by turns

    def say(self, length: int) -> None:
        """Add a message of the user, of so many tokens."""
        self._messages.append(prompt(length, seed=1000 * self._number + len(self._messages)))

    def question(self, max_tokens: int) -> Question:
        """Return the next turn's request, for an answer of so many tokens."""
        roles = ("user", "assistant")
        messages = [
            {"role": roles[index % 2], "content": " ".join(WORDS[token] for token in message)}
            for index, message in enumerate(self._messages)
        ]
        more = {"messages": messages, "conversation_id": self.id, "max_tokens": max_tokens}
        return Question(tokens=(), chat=True, stream=self._stream, more=more)

    def answered(self, answer: Answer) -> None:
        """Remember the answer to the last message."""
        assert answer.complete, answer
        assert answer.finish_reason == "length", answer
        self.asked.append([*self._tokens(len(self._messages)), ANSWER_FOLLOWS])
        self.answers.append([IDS[word] for word in answer.text.split()])
        self._messages.append(self.answers[-1])

    @property
    def seen(self) -> int:
        """How many tokens of the next prompt the engines have seen."""
        return len(self.asked[-1]) + len(self.answers[-1]) if self.asked else 0

    def _tokens(self, messages: int) -> list[int]:
        """Return the tokens of the first messages, as `questions.TEMPLATE` puts them together."""
        tokens: list[int] = []
        for index, message in enumerate(self._messages[:messages]):
            tokens += [ANSWER_FOLLOWS, *message] if index % 2 else message
        return tokens


def ask_each(address: str, model: str, chats: Sequence[Chat], max_tokens: int) -> None:
    """Send the next turn of each chat, all at once, and remember the answers."""
    with ThreadPoolExecutor(len(chats)) as clients:
        answers = clients.map(lambda each: ask(address, each.question(max_tokens), model), chats)
    for chat, answer in zip(chats, answers, strict=True):
        chat.answered(answer)
