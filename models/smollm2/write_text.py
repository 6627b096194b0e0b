"""More text to train on, written by SmolLM2 itself: prompts of many shapes, half of the answers greedy.

One JSON object a line: `text` (the user's prompt), `prompt` and `gen` (token ids), `temperature`. Prompts that are used
for measuring are left out. Some hundred tokens/s on two cores.
"""

import gzip
import json
from itertools import product
from pathlib import Path

import click
import numpy as np
import torch
from features import HERE, TEXTS, read_text
from target import ensure_target
from tqdm import tqdm
from train import is_held_out, measuring_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPES = (
    "Can you help me with {}?",
    "I need to explain {} to my boss. What should I say?",
    "List five facts about {}.",
    "What is {}?",
    "Tell me a joke about {}.",
    "Is {} a good idea? Answer in two sentences.",
    "What do beginners get wrong about {}?",
    "Write a short letter to a museum about {}.",
    "How much does {} cost, and what does it depend on?",
    "My friend knows nothing about {}. Give me a summary for her.",
    "Describe {} in the style of a weather report.",
    "Which three books would you read about {}?",
    "Turn this into a headline: a town discovers {}.",
    "I have one hour and no money. What can I do about {}?",
    "How can I get better at {}?",
    "Who was the first to write about {}?",
    "When did people start to care about {}?",
    "My daughter asked me about {} today. What can I tell her?",
    "What should I check first when something goes wrong with {}?",
    "Suggest names for a podcast on {}.",
    "Which is more useful, {} or a good map?",
    "Give me a checklist for {}.",
    "Why do some people dislike {}?",
    "How does {} work?",
    "Write an invitation to an evening about {}.",
    "What could I say to a colleague who talks about {} all day?",
    "Put these words in order of importance for {}: time, money, patience.",
    "Describe the sound of {}.",
    "I am nervous about {}. Any tips?",
    "Write a diary entry about {}.",
    "What is the difference between {} and a hobby?",
    "How many people does it take to organise {}? Explain your reasoning.",
    "Recommend a weekend plan around {}.",
    "Write a short thank-you speech that mentions {}.",
    "What would a visitor from another planet think of {}?",
    "Explain the rules of {} as if it were a game.",
    "What tools do I need for {}?",
    "Summarise in one sentence why {} matters.",
    "Write a question and an answer about {}.",
    "How do I talk about {} without boring people?",
    "Imagine a world without {}. What changes?",
    "Give me a simple exercise to understand {}.",
    "Is it true that {} can be learned in a week?",
    "Tell me about {}.",
    "What happens at the beginning of {}?",
    "Help me choose a present for someone who loves {}.",
    "Write a recipe inspired by {}.",
    "What are good safety rules for {}?",
    "Make up a proverb about {}.",
    "Compare {} in winter and in summer.",
    "I want to start a club for {}. Where do I begin?",
    "Write the first lines of a song about {}.",
    "How would a doctor talk about {}?",
    "How would an engineer talk about {}?",
    "What are signs that somebody is good at {}?",
    "Write a polite refusal to take part in {}.",
    "Calculate how much time I spend on {} in a year if I do it for ten minutes a day.",
    "What jobs are there around {}?",
    "Where in the world is {} most popular, and why?",
    "Write a text message to my brother about {}.",
)
TOPICS = (
    "bicycle repair",
    "night trains",
    "sourdough",
    "the northern lights",
    "compound interest",
    "chess openings",
    "beekeeping",
    "winter tyres",
    "window boxes",
    "the Roman army",
    "knitting",
    "solar panels",
    "tea ceremonies",
    "insurance",
    "volcanoes",
    "public speaking",
    "violins",
    "marathon training",
    "school lunches",
    "spreadsheets",
    "glaciers",
    "dog training",
    "whales",
    "street food",
    "the water cycle",
    "paper planes",
    "fire alarms",
    "black and white film",
    "elections",
    "mental arithmetic",
    "hiking boots",
    "libraries",
    "small sailing boats",
    "allergies",
    "castles",
    "recycling",
    "fashion",
    "hot air balloons",
    "garden sheds",
    "crossword puzzles",
    "sign language",
    "moving house",
    "second-hand furniture",
    "bird watching",
    "the metric system",
    "jam making",
    "astronomy",
    "roller skates",
    "learning Italian",
    "first aid",
    "old radios",
    "ice cream",
    "traffic lights",
    "swimming",
    "family trees",
    "camping stoves",
    "handwriting",
    "wooden toys",
    "the tides",
    "cheese",
    "board games",
    "road trips",
    "neighbours",
    "early mornings",
    "thunderstorms",
    "stamp collecting",
    "model railways",
    "noodle soup",
    "opera",
    "maps",
)
TEMPERATURES = (0.0, 0.0, 0.3, 0.7)


@click.command()
@click.option("--count", default=1152, show_default=True, help="Answers to write.")
@click.option("--seed", default=11, show_default=True)
@click.option("--batch", default=128, show_default=True)
@click.option("--max-new", default=160, show_default=True)
@click.option("--out", type=Path, default=HERE / "text" / "self-b.jsonl.gz", show_default=True)
@torch.inference_mode()
def main(count: int, seed: int, batch: int, max_new: int, out: Path) -> None:
    """Write COUNT answers; run features.py and train.py again afterwards."""
    target = ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    taken = measuring_prompts() | {answer["text"] for path in TEXTS for answer in read_text(path)}
    texts = [shape.format(topic) for shape, topic in product(SHAPES, TOPICS)]
    texts = [text[0].upper() + text[1:] for text in texts]
    texts = [text for text in texts if text not in taken and not is_held_out(text)]
    random = np.random.default_rng(seed)
    random.shuffle(texts)
    torch.manual_seed(seed)
    with gzip.open(out, "wt", encoding="utf-8") as lines:
        for first in tqdm(range(0, min(count, len(texts)), batch)):
            chosen, temperature = texts[first : first + batch], TEMPERATURES[first // batch % len(TEMPERATURES)]
            chats = [[{"role": "user", "content": text}] for text in chosen]
            inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt")
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_p": 0.95} if temperature else {"do_sample": False}
            )
            outputs = model.generate(**inputs, max_new_tokens=max_new, **sampling)
            width = inputs["input_ids"].shape[1]
            for text, ids, used, output in zip(
                chosen, inputs["input_ids"], inputs["attention_mask"], outputs, strict=True
            ):
                answer = output[width:].tolist()
                answer = answer[: answer.index(2) + 1] if 2 in answer else answer
                prompt = ids[used.bool()].tolist()
                lines.write(
                    json.dumps({"text": text, "prompt": prompt, "gen": answer, "temperature": temperature}) + "\n"
                )


if __name__ == "__main__":
    main()
