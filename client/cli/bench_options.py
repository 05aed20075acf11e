"""The mapping of options of `vllm bench serve` that `outrider bench` does not have itself.

Not here: how a line is read (foreign_options.py).
"""

from __future__ import annotations

from outrider.client.cli.foreign_options import OptionTable, by_option

_ONE_LENGTH = "all random prompts have the length --random-input-len"

VLLM_BENCH = OptionTable(
    "vllm bench serve",
    same={
        "--input-len": "--random-input-len",
        **dict.fromkeys(("--output-len", "--custom-output-len"), "--random-output-len"),
    },
    ignored=by_option(
        {
            "the endpoint says which API is measured": "--backend --endpoint-type",
            "a file is given with --dataset-path": "--dataset-name",
            "the server counts the tokens": "--tokenizer --tokenizer-mode --trust-remote-code",
            "arrivals are Poisson": "--burstiness",
            _ONE_LENGTH: "--random-range-ratio --random-prefix-len",
            "every request is in the figures": "--num-warmups",
            "the server must be ready": "--ready-check-timeout-sec",
            "a bar is shown in terminals only": "--disable-tqdm",
            "files are named by model, rate and time": "--label",
            "requests are sent in the order of the file": "--disable-shuffle --no-oversample --skip-chat-template",
            "the server names requests": "--request-id-prefix",
        }
    ),
    refused=by_option(
        {
            "an OpenAI-compatible server is measured": "--backend --endpoint-type",
            'make JSON lines of it, {"prompt": ...} or {"messages": [...]}, and give them with --dataset-path': """
                --dataset-name --hf-subset --hf-split --hf-name --hf-output-len --sharegpt-output-len
                --sonnet-input-len --sonnet-output-len --sonnet-prefix-len""",
            "arrivals are Poisson; leave the option out": """--burstiness --ramp-up-strategy --ramp-up-start-rps
                --ramp-up-end-rps --probe-request-rate""",
            f"{_ONE_LENGTH}; leave the option out": "--random-range-ratio --random-prefix-len",
            "of sampling parameters only --temperature is sent": """--top-p --top-k --min-p --frequency-penalty
                --presence-penalty --repetition-penalty --logprobs --use-beam-search --extra-body --header""",
            "it is not measured; leave the option out": "--goodput --profile --plot-timeline --plot-dataset-stats",
            "figures of a run are saved, in a file of their own": "--save-detailed --append-result --metadata",
            "give the file's path with --result-filename": "--result-dir",
            "adapters are not served; leave the option out": "--lora-modules --lora-assignment",
        }
    ),
    flags=frozenset(
        "--trust-remote-code --disable-tqdm --disable-shuffle --no-oversample --skip-chat-template".split()  # noqa: SIM905
    ),
    only={
        **dict.fromkeys(
            ("--backend", "--endpoint-type"), "vllm|vllm-chat|openai|openai-chat|sglang|sglang-oai.*|lmdeploy"
        ),
        "--dataset-name": "random|custom",
        "--burstiness": r"1(\.0)?",
        **dict.fromkeys(("--random-range-ratio", "--random-prefix-len"), r"0(\.0)?"),
    },
)
