"""The text that the demo model learns: short stories of animals, and a chat around them. Public domain.

Every story comes of a few tables and a random generator, so the text can be made again from its seed:

    python -m scripts.demo stories [--count 3] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Turn", "conversations", "story"]


class Turn(NamedTuple):
    """A question of a user, and the answer."""

    question: str
    answer: str


class Hero(NamedTuple):
    """An animal of a story. ``he``, ``him`` and ``his``: its pronouns."""

    animal: str
    name: str
    he: str
    him: str
    his: str


_NAMES = {
    "fox": "Rusty", "bear": "Bruno", "owl": "Olive", "mouse": "Pip", "rabbit": "Clover", "hedgehog": "Needle",
    "squirrel": "Hazel", "frog": "Fergus", "duck": "Daisy", "cat": "Misty", "dog": "Biscuit", "horse": "Star",
    "turtle": "Tessa", "sparrow": "Robin", "badger": "Boris", "otter": "Finn", "goat": "Greta", "crow": "Inky",
}  # fmt: skip
ANIMALS = tuple(_NAMES)
_FEMALE = {"owl", "rabbit", "squirrel", "duck", "cat", "turtle", "goat"}
_TRAITS = ("small", "brave", "clever", "shy", "kind", "curious", "cheerful", "patient", "quiet", "lazy")
_PLACES = (
    "at the edge of a wide forest", "near a slow green river", "under the roots of an old oak", "on a windy hill",
    "in a garden behind a red house", "by a quiet lake", "in a valley between two mountains", "next to an old mill",
)  # fmt: skip
_TIMES = (
    "One morning",
    "One evening",
    "One day in spring",
    "On a cold winter day",
    "One rainy afternoon",
    "Early one day",
)
_THINGS = (
    "blue scarf",
    "silver key",
    "favourite cup",
    "little lantern",
    "wooden flute",
    "warm blanket",
    "red ball",
)
_SPOTS = (
    "behind the big stone",
    "under the wooden bridge",
    "in the tall grass",
    "next to the well",
    "inside a hollow tree",
)
_FOODS = ("apples", "nuts", "berries", "warm bread", "honey", "sweet carrots")

_GREETINGS = ("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey", "hello", "hi")
_IDENTITY = ("Who are you?", "What are you?", "What is your name?", "who are you", "Introduce yourself.")
_ABILITY = ("What can you do?", "Help", "help", "How can you help me?", "What do you know?")
_THANKS = ("Thank you", "Thanks!", "thanks", "That was nice.", "I like it.", "Good story!")
_MORE = (
    "Another one, please.",
    "Tell me another story.",
    "One more!",
    "more",
    "Another story about a {animal}.",
)
_ASK_ANY = (
    "Tell me a story.",
    "Tell a story",
    "Write a short story.",
    "A story, please.",
    "Tell me something.",
    "story",
)
_ASK_ABOUT = (
    "Tell me a story about a {animal}.", "Tell me a story about a {trait} {animal}.", "Write about a {animal}.",
    "A story about a {animal}, please.", "Write a short story about a {trait} {animal}.", "tell me about a {animal}",
    "Do you know a story about a {animal}?", "{animal}", "I like the {animal}.", "What does the {animal} do?",
)  # fmt: skip
_OTHER_TEXT = (
    "what when where why how the of and to in is you that it was for on are with as they at be this have from or had by "
    "word but not all were we your can said there use an each which do their if will up other about out many then them "
    "write code number python explain list Paris France capital weather today sum count translate summarize email joke "
    "poem 1 2 3 7 12 42 100 + - = ? ! . , : best large language model server token time world people news music color"
)
_OTHER = tuple(_OTHER_TEXT.split())


def conversations(seed: int) -> Iterator[tuple[Turn, ...]]:
    """Yield conversations without end. A conversation of one turn with an empty question is a text that goes on by itself."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.2:
            yield (Turn("", story(rng)),)
        else:
            yield tuple(_turn(rng, number) for number in range(rng.choice((1, 1, 1, 2, 2, 3))))


def _turn(rng: random.Random, number: int) -> Turn:
    kinds: list[Callable[[random.Random], Turn]] = [_any, *[_about] * 6, _other, _other, _short]
    return _more(rng) if number and rng.random() < 0.5 else rng.choice(kinds)(rng)


def _any(rng: random.Random) -> Turn:
    return Turn(rng.choice(_ASK_ANY), story(rng))


def _about(rng: random.Random) -> Turn:
    animal, trait = rng.choice(ANIMALS), rng.choice(_TRAITS)
    asked = rng.choice(_ASK_ABOUT)
    return Turn(
        asked.format(animal=animal, trait=trait), story(rng, animal, trait if "{trait}" in asked else None)
    )


def _more(rng: random.Random) -> Turn:
    animal, asked = rng.choice(ANIMALS), rng.choice(_MORE)
    return Turn(asked.format(animal=animal), story(rng, animal if "{animal}" in asked else None))


def _other(rng: random.Random) -> Turn:
    asked = " ".join(rng.choice(_OTHER) for _ in range(rng.randint(1, 14)))
    asked = asked[:1].upper() + asked[1:] if rng.random() < 0.5 else asked
    start = rng.choice(
        ("I am too small for that, but I know a story.", "I only know little stories. Here is one.")
    )
    return Turn(asked + rng.choice(("", ".", "?")), f"{start} {story(rng)}")


def _short(rng: random.Random) -> Turn:
    match rng.randrange(4):
        case 0:
            return Turn(
                rng.choice(_GREETINGS), f"Hello! Shall I tell you a story about a {rng.choice(ANIMALS)}?"
            )
        case 1:
            return Turn(
                rng.choice(_IDENTITY), "I am the demo model of llamasup. I am very small, and I tell stories."
            )
        case 2:
            return Turn(rng.choice(_ABILITY), 'I tell little stories. Ask me: "Tell me a story about a fox."')
        case _:
            return Turn(rng.choice(_THANKS), "You are welcome! Shall I tell you another one?")


# --- stories


def story(rng: random.Random, animal: str | None = None, trait: str | None = None) -> str:
    """One paragraph of 8 to 14 sentences. None: any."""
    hero = _hero(animal or rng.choice(ANIMALS))
    friend = _hero(rng.choice([other for other in ANIMALS if other != hero.animal]))
    trait = trait or rng.choice(_TRAITS)
    plot = rng.choice((_lost, _river, _hungry, _storm, _dark, _gift, _race, _alone))
    article = "an" if trait[0] in "aeiou" else "a"
    opening = rng.choice((
        f"Once upon a time there was {article} {trait} {hero.animal} named {hero.name}.",
        f"Once there lived {article} {trait} {hero.animal}. {_cap(hero.his)} name was {hero.name}.",
        f"There was once {article} {trait} {hero.animal} called {hero.name}.",
    ))  # fmt: skip
    home = f"{hero.name} lived {rng.choice(_PLACES)}."
    return " ".join((opening, home, *plot(rng, hero, friend), _ending(rng, hero, friend)))


def _hero(animal: str) -> Hero:
    pronouns = ("she", "her", "her") if animal in _FEMALE else ("he", "him", "his")
    return Hero(animal, _NAMES[animal], *pronouns)


def _lost(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    thing = rng.choice(_THINGS)
    first, second, found = rng.sample(_SPOTS, 3)
    yield f"{rng.choice(_TIMES)} {hero.name} could not find {hero.his} {thing}."
    yield f"{_cap(hero.he)} looked {first}, but it was not there."
    yield f"Then {hero.he} looked {second}, but it was not there either."
    yield rng.choice((f"{hero.name} sat down and began to cry.", f"{hero.name} was very sad."))
    yield f'{_a(friend)} named {friend.name} came by and asked, "What is wrong?"'
    yield f'"I have lost my {thing}," said {hero.name}.'
    yield f'"Let us look together," said {friend.name}. So they looked {found}, and there it was.'
    yield f"{hero.name} was so happy that {hero.he} danced with {hero.his} {thing}."


def _river(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    food = rng.choice(_FOODS)
    were = "was" if food in ("honey", "warm bread") else "were"
    yield f"{rng.choice(_TIMES)} {hero.name} wanted to cross the river. On the other side there {were} {food}."
    yield "But the water was deep and fast, and there was no bridge."
    yield f"First {hero.he} tried to jump, but the river was too wide."
    yield rng.choice(
        (
            f"Then {hero.he} tried to swim, but the water was too cold.",
            f"Then {hero.he} called for a boat, but no boat came.",
        )
    )
    yield f'{friend.name} the {friend.animal} saw {hero.him} and laughed. "I know a better way," {friend.he} said.'
    yield "Together they pushed an old tree over the water, and the tree was a bridge."
    yield f"They sat on the other side and ate {food} until the sun went down."


def _hungry(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    food = rng.choice(_FOODS)
    yield f"{rng.choice(_TIMES)} {hero.name} was very hungry, but there was nothing to eat at home."
    yield f"So {hero.he} took a basket and went out to look for {food}."
    yield f"{_cap(hero.he)} walked for a long time and found nothing."
    yield f"Near the path {hero.he} met {_a(friend).lower()} who had a lot of {food}."
    yield f'"Please, may I have some?" asked {hero.name}.'
    yield rng.choice((
        f"\"Of course,\" said {friend.name}. \"There is enough for two.\"",
        f"\"If you help me carry it home,\" said {friend.name}, \"you may have half.\"",
    ))  # fmt: skip
    yield f"{hero.name} said thank you, and they ate {food} together."


def _storm(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    yield f"{rng.choice(_TIMES)} dark clouds came over the sky, and a great storm began."
    yield f"The wind took the roof of the little house, and {hero.name} was cold and wet."
    yield f"{_cap(hero.he)} knocked at the door of {friend.name} the {friend.animal}."
    yield f'"Come in and sit by the fire," said {friend.name}.'
    yield "All night they told each other stories while the rain fell."
    yield "In the morning the sun was shining again."
    yield f"{friend.name} helped {hero.name} to build a new roof, and it was stronger than the old one."


def _dark(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    yield f"{hero.name} was not afraid of anything, except the dark."
    yield f"{rng.choice(_TIMES)} {hero.he} walked too far, and soon it was night."
    yield f"{_cap(hero.he)} heard a strange sound {rng.choice(_SPOTS)}, and {hero.his} heart beat fast."
    yield '"Who is there?" asked a voice in the dark.'
    yield f"It was only {friend.name} the {friend.animal}, who was afraid as well."
    yield f'"Let us walk home together," said {hero.name}. "Then we are two."'
    yield "They looked up and saw a thousand stars, and the night was not so dark any more."


def _gift(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    thing = rng.choice(_THINGS)
    yield f"The next day was the birthday of {friend.name} the {friend.animal}, but {hero.name} had no gift."
    yield f"{_cap(hero.he)} had no money, and all the shops were closed."
    yield f"{hero.name} thought for a long time. Then {hero.he} took {hero.his} own {thing} and cleaned it until it shone."
    yield f'When {friend.name} opened the box, {friend.he} smiled. "But this is your {thing}!" {friend.he} said.'
    yield f'"Now it is yours," said {hero.name}, "because you are my friend."'
    yield rng.choice(("It was the best birthday of all.", "They ate cake and sang until midnight."))


def _race(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    yield f'{rng.choice(_TIMES)} {friend.name} the {friend.animal} said, "I am faster than you."'
    yield f'"Let us have a race to the old mill," said {hero.name}.'
    yield f"All the animals came to watch. {friend.name} ran as fast as the wind and was soon far ahead."
    yield f"But half way {friend.he} lay down to rest, and fell asleep under a tree."
    yield f"{hero.name} ran slowly, step by step, and did not stop."
    yield f"When {friend.name} woke up, {hero.name} was already at the mill."
    yield f"{friend.name} was angry at first, but then {friend.he} laughed and shook {hero.his} hand."


def _alone(rng: random.Random, hero: Hero, friend: Hero) -> Iterator[str]:
    yield f"{hero.name} had a warm house and enough {rng.choice(_FOODS)}, but {hero.he} had no friends."
    yield f"{rng.choice(_TIMES)} a new animal came to live next door. It was {_a(friend).lower()} named {friend.name}."
    yield f"{hero.name} wanted to say hello, but {hero.he} did not know how."
    yield f"So {hero.he} put {rng.choice(_FOODS)} on a plate and left it at the door."
    yield 'The next morning the plate was back, and a letter lay on it. "Thank you," it said. "Come and play with me."'
    yield f"{hero.name} read the letter three times and ran outside."


def _ending(rng: random.Random, hero: Hero, friend: Hero) -> str:
    return rng.choice((
        f"From that day on, {hero.name} and {friend.name} were the best of friends.",
        f"That night {hero.name} slept well and dreamed of {friend.name}.",
        "And that is how it was. The end.",
        f"And {hero.name} never forgot what {friend.name} had done.",
        "A good friend is worth more than gold.",
    ))  # fmt: skip


def _a(hero: Hero) -> str:
    return f"An {hero.animal}" if hero.animal[0] in "aeiou" else f"A {hero.animal}"


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=3, help="conversations")
    parser.add_argument("--seed", type=int, default=1)


def main(args: argparse.Namespace) -> None:
    source = conversations(args.seed)
    for _ in range(args.count):
        for question, answer in next(source):
            print(f"> {question}\n{answer}\n")
