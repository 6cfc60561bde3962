"""Evaluation and load tools of others against `lampejo serve`: lm-eval and guidellm, each a short run.

    python scripts/clients.py                    # in a virtual environment of its own, .venv-clients, made once (6 GB)
    python scripts/clients.py --tools lm-eval

lm-eval measures likelihoods (local-completions, with token ids, echo and log probabilities of the prompt) and generates
(local-chat-completions) on two tasks that are written here, since data sets want a network. Its likelihoods must be
those of this process within 1e-3. guidellm sends synthetic chats, two at once; none may fail. The last line is one JSON
object. Exit code 1 if anything is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from soak import serving

import lampejo
from lampejo.frontend import SyncOutbox

ROOT = Path(__file__).parent.parent
PACKAGES = {"lm-eval": "lm-eval[api]", "guidellm": "guidellm"}
COMMANDS = {"lm-eval": "lm-eval", "guidellm": "guidellm"}
QUESTIONS = [
    ("The capital of France is", [" Paris", " seven", " a kind of cheese that nobody eats"], 0),
    ("Two plus two is", [" the moon", " four", " green and slow"], 1),
    ("Water freezes at zero degrees", [" Celsius", " banana", " of the alphabet"], 0),
    ("The opposite of hot is", [" cold", " Tuesday", " seventeen"], 0),
    ("A dog is an", [" integer", " animal", " hour"], 1),
]
LIKELIHOOD = """
task: likelihood
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATION = """
task: generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Go on: {{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


def environment(folder: Path, tools: list[str]) -> Path:
    """Where the tools' commands lie; what is missing is installed."""
    commands = folder / "bin"
    if not commands.exists():
        venv.create(folder, with_pip=True)
    missing = [PACKAGES[tool] for tool in tools if not (commands / COMMANDS[tool]).exists()]
    if missing:
        print(f"installing {' and '.join(missing)} in {folder}, which takes minutes", file=sys.stderr)
        subprocess.run([commands / "python", "-m", "pip", "install", "-q", *missing], check=True)
    return commands


def run(folder: Path, *command: str | Path) -> None:
    """The tools are kept from looking for hubs that they do not need."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), "OPENAI_API_KEY": "none"}
    log = folder / "log"
    with log.open("w") as out:
        code = subprocess.run(
            command, cwd=folder, env=os.environ | offline, stdout=out, stderr=subprocess.STDOUT, timeout=600
        ).returncode
    if code:
        raise SystemExit(f"{Path(command[0]).name} ended with {code}:\n{log.read_text()[-3000:]}")


def write_tokenizer(llm: lampejo.LLM, folder: Path) -> None:
    """As transformers reads it: the tools count and cut by tokens."""
    llm.tokenizer.backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": llm.chat_template}
    end = llm.tokenizer.backend.id_to_token(llm.engine.eos_ids[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": end}))


def run_lm_eval(commands: Path, url: str, llm: lampejo.LLM, folder: Path, model: str) -> dict[str, Any]:
    data = folder / "questions.jsonl"
    lines = [json.dumps(dict(zip(("question", "choices", "answer"), one, strict=True))) for one in QUESTIONS]
    data.write_text("\n".join(lines))
    for name, task in {"likelihood": LIKELIHOOD, "generation": GENERATION}.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    common = ["--include_path", str(folder), "--log_samples"]
    of_model = f"model={model},tokenizer={folder},num_concurrent=2"

    program = [commands / "lm-eval", "run"]
    where = f"base_url={url}/v1/completions,{of_model}"
    run(folder, *program, "--model", "local-completions", "--tasks", "likelihood", *common,
        "--model_args", where, "--output_path", str(folder / "of_likelihood"))  # fmt: skip
    told = results(folder / "of_likelihood")
    differences = [
        abs(float(response[0][0]) - likelihood(llm, QUESTIONS[sample["doc_id"]][0], choice))
        for sample in told["samples"]
        for response, choice in zip(sample["resps"], sample["doc"]["choices"], strict=True)
    ]
    where = f"base_url={url}/v1/chat/completions,{of_model}"
    run(folder, *program, "--model", "local-chat-completions", "--tasks", "generation", *common,
        "--apply_chat_template", "--model_args", where, "--output_path", str(folder / "of_generation"))  # fmt: skip
    generated = [sample["resps"][0][0] for sample in results(folder / "of_generation")["samples"]]
    return {
        "accuracy": told["results"]["likelihood"]["acc,none"],
        "likelihoods": len(differences),
        "largest_difference": max(differences),
        "generated": len([text for text in generated if text]),
        "ok": max(differences) < 1e-3 and len(generated) == len(QUESTIONS) and all(generated),
    }


def results(folder: Path) -> dict[str, Any]:
    (summary,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    return json.loads(summary.read_text()) | {"samples": [json.loads(line) for line in samples.open()]}


def likelihood(llm: lampejo.LLM, question: str, choice: str) -> float:
    """Log probability of the choice after the question, in this process."""
    start = llm.tokenizer.encode(question)
    ids = llm.tokenizer.encode(question + choice)
    request = llm.make_request(ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outbox = SyncOutbox()
    llm.frontend.submit(request, outbox)
    for _ in outbox:  # until the request ends
        pass
    return sum(entry.logprob for entry in request.of_prompt[len(start) - 1 :])


def run_guidellm(commands: Path, url: str, folder: Path, model: str) -> dict[str, Any]:
    report = folder / "guidellm.json"
    run(
        folder,
        *(commands / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    tokens = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
    return {"requests": totals, "output_tokens": tokens, "ok": totals["successful"] == 8 and totals["errored"] == 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tools", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-clients")
    args = parser.parse_args()
    commands = environment(args.venv, args.tools)
    told: dict[str, Any] = {}
    with (
        serving(args.model) as (url, _),
        lampejo.load(args.model) as llm,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        write_tokenizer(llm, folder)
        if "lm-eval" in args.tools:
            told["lm-eval"] = run_lm_eval(commands, url, llm, folder, args.model)
        if "guidellm" in args.tools:
            told["guidellm"] = run_guidellm(commands, url, folder, args.model)
    print(json.dumps(told))
    return 0 if all(one["ok"] for one in told.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
