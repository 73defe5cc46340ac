"""The command `tridecode evaluate-prompts`."""

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate_prompts(
    data: Annotated[Path, typer.Argument(help="Questions as JSON lines: context, question, answer.")],
    task: Annotated[int | None, typer.Option(min=0, help="Number of the model's task.")] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="NeMo archive or PEFT folder, sent with each request instead of a task."),
    ] = None,
    table_task: Annotated[
        str | None, typer.Option(help="Name of the table, for an archive with several.")
    ] = None,
    start_id: Annotated[
        int | None,
        typer.Option(min=0, help="First virtual id to send; default: the server places the table."),
    ] = None,
    positions: Annotated[
        int | None, typer.Option(min=1, help="With --task and --start-id: number of virtual ids.")
    ] = None,
    url: Annotated[
        str, typer.Option("--url", "-u", help="host[:port] of the server's gRPC; port 8001.")
    ] = "localhost:8001",
    model: Annotated[str, typer.Option("--model", "-m", help="A model of token ids.")] = "fastertransformer",
    template: Annotated[
        str | None,
        typer.Option(help="Prompt with fields of the data in braces; default: SQuAD's of NeMo."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Repository or tokenizer folder; default: the one served on this machine."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, max=1024, help="Rows per request.")] = 1,
    max_output_len: Annotated[int, typer.Option(min=1, help="New tokens per answer.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many questions.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Longest wait for a response.")] = 600.0,
    output: Annotated[Path | None, typer.Option(help="Write every answer as JSON.")] = None,
) -> None:
    """Measure a prompt-learning task through a server.

    Reports the share of exact answers and their F1, as defined by SQuAD, like FasterTransformer's
    gpt_prompt_learning_squad_task_eval.py.

    \b
    Example:
      tridecode evaluate-prompts squad.jsonl --task 0
    """
    from rich.console import Console

    from tridecode.tools.evaluate.prompt_run import evaluate_prompts as run
    from tridecode.tools.evaluate.prompt_run import learned_of, summary
    from tridecode.tools.evaluate.prompt_tasks import SQUAD

    answered = run(
        data,
        learned_of(task, table, table_task, start_id, positions),
        url=url,
        model=model,
        template=SQUAD if template is None else template.replace("\\n", "\n"),
        tokenizer=tokenizer,
        batch=batch,
        max_output_len=max_output_len,
        limit=limit,
        timeout_s=timeout_s,
    )
    found = summary(answered)
    Console(highlight=False, soft_wrap=True).print(
        f"{found['questions']:,} questions: exact {found['exact']:.2f} %, F1 {found['f1']:.2f} %"
    )
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
