"""What is asked: own prompts by category, as people write them. Nothing here is random, and every answer ends where the
model ends it or at ``max_tokens``: acceptance measured on anything else is false.
"""

import json
from collections.abc import Callable, Mapping

from lampejo.bench import texts

Messages = tuple[Mapping[str, str], ...]

CHAT = (
    "What are three things I should check before buying a used bicycle?",
    "My neighbour plays the drums every evening. How can I talk to her about it without a quarrel?",
    "Explain to a ten-year-old why the moon does not fall down.",
    "I have two days in Lisbon and I do not like museums. What would you do?",
    "What is the difference between a virus and a bacterium?",
    "Give me some ideas for a birthday party for twelve children when it is raining.",
    "I keep forgetting people's names a minute after I hear them. What helps?",
    "Should I learn to touch-type at fifty? Give me reasons for and against.",
    "How do I get red wine out of a white tablecloth?",
)
CODE = (
    "Write a Python function that merges two sorted lists into one sorted list, without using sorted().",
    "Write a JavaScript function that groups an array of objects by the value of a given key.",
    "Write a Python class for a stack with push, pop, peek and is_empty, and a short test for it.",
    "Write a C function that counts the words in a string.",
    "Write a SQL query that lists the ten customers with the highest total of orders in 2024. The tables are "
    "customer(id, name) and orders(id, customer_id, amount, placed_on).",
    "Write a Python script that reads a CSV file and prints the average of each numeric column.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Implement binary search in Rust for a slice of i32, returning an Option<usize>.",
    "Write an HTML page with a form for a name, an e-mail address and a message, with labels for each field.",
)
MATHS = (
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain step by step.",
    "A shirt costs 48 euros after a discount of 20 percent. What did it cost before? Show your work.",
    "Solve 3x + 7 = 2x - 5 step by step.",
    "Find the sum of the whole numbers from 1 to 100, and explain the trick.",
    "A rectangle is twice as long as it is wide, and its perimeter is 54 cm. What is its area?",
    "What is the probability of getting at least one six in four throws of a die? Explain each step.",
    "Anna is three times as old as Ben. In ten years she will be twice as old. How old are they now?",
    "Prove that the square root of 2 is irrational.",
    "A tank is filled by one pipe in 6 hours and by another in 4 hours. How long do both need together?",
)
PROSE = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Describe a market on a winter morning, using all five senses.",
    "Write a poem in four stanzas about a river that runs through a city.",
    "Write the opening paragraph of a detective novel set in a small mountain village.",
    "Write a speech of one minute for the retirement of a bus driver.",
    "Tell the story of the tortoise and the hare from the point of view of the hare.",
    "Write a dialogue between an old tree and the young one beside it.",
    "Write a letter from a soldier to his sister, without mentioning the war.",
)
PORTUGUESE = (
    "Explique em poucas palavras o que é a fotossíntese.",
    "Escreva um poema curto sobre o mar de inverno.",
    "Quais são três dicas para quem quer começar a correr?",
    "Conte a história de um gato que queria aprender a nadar.",
    "Qual é a diferença entre clima e tempo?",
    "Escreva um e-mail pedindo desculpas por chegar atrasado a uma reunião.",
    "Como se faz um bom café coado? Descreva os passos.",
    "Traduza para o português e explique a expressão: the early bird catches the worm.",
)
LANGUAGES = (
    "Explica en pocas frases por qué el cielo es azul.",
    "Écris une courte lettre à un ami pour l'inviter à la campagne.",
    "Erkläre, wie man ein Fahrrad mit einem platten Reifen repariert.",
    "Scrivi una ricetta semplice per la pasta al pomodoro.",
    "Translate into French, Spanish and German: The library is closed on Mondays.",
    "Leg in het Nederlands uit wat een dijk is.",
    "用中文写三句话介绍一下长城。",
    "日本語で自己紹介の例を書いてください。",
    "Напиши короткое стихотворение о зиме.",
)


def _function(name: str, description: str, required: tuple[str, ...], **types: str) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": description, "parameters": parameters}


_FUNCTIONS = [
    _function("get_weather", "Weather of a place on a day", ("city",), city="string", date="string", units="string"),
    _function(
        "search_flights",
        "Flights between two airports",
        ("origin", "destination", "date"),
        origin="string",
        destination="string",
        date="string",
        passengers="integer",
    ),
    _function(
        "add_event",
        "Adds an event to the calendar",
        ("title", "start"),
        title="string",
        start="string",
        minutes="integer",
        guests="array",
    ),
]
_TOOLS_SYSTEM = (
    "You can call these functions. Answer with one JSON object per call, like "
    '{"name": ..., "arguments": {...}}, and nothing else.\n' + json.dumps(_FUNCTIONS, indent=1)
)
TOOLS = (
    "What will the weather be like in Porto tomorrow, in degrees Celsius?",
    "Find me a flight from Zurich to Nairobi on 3 September for two people.",
    "Put a dentist's appointment into my calendar on Thursday at 8:30, half an hour.",
    "Is it colder in Oslo or in Helsinki today?",
    "I fly from Lyon to Lisbon on 12 May. Look for flights, and tell me the weather there on that day.",
    "Schedule a meeting called budget review on Monday at 14:00 with Ruth and Tomasz, for an hour and a half.",
    "Compare the weather in Rio de Janeiro, Montevideo and Buenos Aires on Saturday.",
    "Add lunch with Ines on Friday at noon, and tell me whether it will rain in Berlin then.",
)

# (what to do, the text): the answer repeats most of the text.
EDITING = (
    (
        "Rename the class Inventory to Stock and the method report to print_report. Give back the whole file.",
        texts.INVENTORY_PY,
    ),
    ("Change the number of replicas to 5 and the log level to debug. Print the whole file again.", texts.SERVICE_YAML),
    ("Change the price to 380 pounds and the time to two weeks. Repeat the whole letter.", texts.LETTER),
    ("Add a column phone of type TEXT to the table member. Print all statements again.", texts.SCHEMA_SQL),
    ("The summer feast was moved to 28 June. Repeat the minutes with the new date.", texts.MINUTES),
    ("Rename unitPrice to price everywhere and give back the whole file.", texts.CART_JS),
    ("Quote the text above word for word, with a line of three dashes before and after it.", texts.LIGHTHOUSE),
    ("The program is now called seaclock. Print the whole README again with the new name.", texts.README_MD),
    ("Halve nothing, change nothing: copy the recipe exactly as it is.", texts.RECIPE),
)


def _said(*contents: str) -> Messages:
    roles = ("user",) if len(contents) == 1 else ("system", "user")
    return tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=True))


CATEGORIES: dict[str, tuple[Messages, ...]] = {
    "chat": tuple(map(_said, CHAT)),
    "code": tuple(map(_said, CODE)),
    "maths": tuple(map(_said, MATHS)),
    "prose": tuple(map(_said, PROSE)),
    "editing": tuple(_said(f"{text}\n{task}") for task, text in EDITING),
    "tools": tuple(_said(_TOOLS_SYSTEM, task) for task in TOOLS),
    "portuguese": tuple(map(_said, PORTUGUESE)),
    "languages": tuple(map(_said, LANGUAGES)),
}
WARM_UP = _said("Say something nice about the number seven, then count from one to ten.")
CONCURRENT = ("chat", "code", "maths", "prose")  # what requests beside each other ask, in turn


def mixed(num_prompts: int, skip: int = 0) -> list[Messages]:
    """Prompts of several categories, in turn; ``skip`` begins later, so that another round asks something else."""
    pool = [prompts[i] for i in range(8) for prompts in (CATEGORIES[name] for name in CONCURRENT)]
    return [pool[(skip + i) % len(pool)] for i in range(num_prompts)]


def long_prompt(num_tokens: int, count: Callable[[Messages], int]) -> Messages | None:
    """About ``num_tokens`` of running text with a question behind it, never more; None if the texts do not suffice."""
    text = "\n".join(texts.ALL)

    def prompt(num_chars: int) -> Messages:
        return _said(f"{text[:num_chars]}\n\nSummarise all of this in a few sentences.")

    if count(prompt(len(text))) < num_tokens:
        return None
    low, high = 1, len(text)  # the largest number of characters that fits, by halving
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(prompt(middle)) <= num_tokens else (low, middle - 1)
    return prompt(low)
