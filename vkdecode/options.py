"""Arguments and options that several commands of `vkdecode` share."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder or a .gguf file.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        help="Ordinal, kind, or part of the name, as in `vkdecode devices`. [default: VKDECODE_DEVICE, the best GPU]",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="Hold weights as f32, f16, bf16, q8_0 or q4_0. [default: as they are stored]"),
]
MaxSeqLenOption = Annotated[
    int | None, typer.Option("--max-seq-len", min=1, help="Positions of the KV cache, for prompt and answer together.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", help="0 always takes the most likely token, so that results repeat.")
]
TopKOption = Annotated[int, typer.Option("--top-k", help="Choose among the K most likely tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Choose among the tokens that make up this probability.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this share of the best one.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable. [default: random]")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="End the text before this string; can be given several times.")
]
