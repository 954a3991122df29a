"""Orchestration of a run: each step of the plan in separate processes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.budget.machine import format_bytes
from pipeline.budget.memory import memory_summary
from pipeline.cli.options import print_error, print_notice, print_output, write_config
from pipeline.config import EMBEDDED
from pipeline.config.deepspeed import ignored_keys_notice
from pipeline.files.durable import write_output
from pipeline.launch.child import ExitStatus, run_child
from pipeline.launch.preflight import check_machines
from pipeline.plan.output import (
    COMMAND,
    JOB_SET,
    REPORT,
    SUMMARY,
    add_to_summary,
    can_resume,
    clear_step,
    discard_empty_step,
    lock_output,
    read_summary,
    record_command,
    with_last_options,
    without_options,
)
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.request import Request, parse_request
from pipeline.plan.stage import Stage
from pipeline.system.errors import (
    EXIT_DISK_FULL,
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_OUT_OF_MEMORY,
    EXIT_USER_ERROR,
    ConfigError,
)
from pipeline.system.installation import CHAT
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, STOP_SIGNALS


def run_plan(plan: Plan) -> None:
    """Run the steps one after another, each in separate processes.

    Raises:
        SystemExit: a step or the upload failed, with an exit code from docs/watching.md. Other
            methods are completed first.
        KeyboardInterrupt: the run was interrupted; the message says how to resume.
    """
    from pipeline.report.page import write_report
    from pipeline.run.push import push_model

    out = plan.request.output_dir
    failed: dict[str, int] = {}
    for stage in plan.stages:
        if stage.name in plan.finished:
            print_output(f"skipping {stage.title}: already finished")
            add_to_summary(out, stage.name)
            continue
        resumes = _resumes(plan, stage)
        try:
            if not resumes:
                clear_step(out, stage.name)
            write_config(plan.configs[stage.name], plan.config_file(stage))
        except OSError as error:
            raise ConfigError(f"--output-dir {out} is not writable: {error}") from None
        print_output(
            f"step {stage.number}: {stage.name}{', from its checkpoint' if resumes else ''}"
        )
        try:
            status = _run_step(plan, stage, resumes=resumes)
        finally:
            discard_empty_step(out, stage.name)
        if status.code == EXIT_DIVERGED:
            write_report(out)  # its curves show when training diverged
        if code := _report_failure(plan, stage, status):
            if stage.method is None:
                raise SystemExit(code)
            failed[stage.method] = code
            continue
        add_to_summary(out, stage.name)
        write_report(out)
    if read_summary(out):  # otherwise every method failed
        print_output("\n".join(_summary_table(plan)))
    for code in failed.values():
        print_error(f"not finished: {', '.join(failed)}; retry with the same command and --resume")
        raise SystemExit(code)
    push_model(plan)


def _run_pod(plan: Plan) -> None:
    """Run this pod's processes of each step; the first pod does everything else."""
    failed: list[int] = []
    for stage in plan.unfinished:
        status = _run_step(plan, stage, resumes=_resumes(plan, stage))
        if code := _report_failure(plan, stage, status):
            failed.append(code)
            if stage.method is None:
                break
    for code in failed:
        raise SystemExit(code)


def _write_job_set(request: Request, argv: Sequence[str]) -> None:
    """Write the manifest of a run on Kubernetes, or print it for `--dry-run`."""
    from pipeline.launch.kubernetes import job_set_manifest

    launch_options = ("deployment_type", "image", "volume", "resume", "dry_run")
    file = request.output_dir / JOB_SET
    text = job_set_manifest(request, request.output_dir, without_options(argv, launch_options))
    if not request.dry_run:
        write_output({file: text}, option="--output-dir")
    print_output(text if request.dry_run else f"kubectl apply -f {shlex.quote(str(file))}")


def _resumes(plan: Plan, stage: Stage) -> bool:
    """Return whether a step resumes its checkpoint, which requires that no earlier step runs."""
    if not plan.request.resume or any(other.number < stage.number for other in plan.unfinished):
        return False
    return can_resume(plan.request.output_dir, stage.name)


def main(argv: Sequence[str], stages: Sequence[Stage]) -> None:
    """Run `train.py`: make the plan, then print or run it."""
    given, argv = argv, with_last_options(argv)
    request = parse_request(argv, stages).request
    if len(argv) > len(given):
        print_notice(
            f"using the options of the run, from {request.output_dir / COMMAND}; their relative"
            " paths refer to the current directory"
        )
    if request.deployment_type == "kubernetes" and request.plan_for is None:
        _write_job_set(request, argv)
        return
    plan = make_plan(argv, stages)
    if plan.request.zero_config is not None and (
        notice := ignored_keys_notice(plan.request.zero_config)
    ):
        print_notice(notice)
    if plan.request.dry_run or plan.request.plan_for is not None:
        from pipeline.plan.checks import check_rows, check_settings
        from pipeline.plan.describe import describe_plan

        check_settings(plan)
        previews = check_rows(plan, downloads=False)
        print_output(describe_plan(plan, previews))
    else:
        _check_and_run(plan, argv)


def _check_and_run(plan: Plan, argv: Sequence[str]) -> None:
    from pipeline.plan.checks import check_rows, check_settings

    for note in plan.notes:
        print_output(note)
    check_settings(plan)
    # Reject models that can't fit before downloading anything to check the rows.
    if plan.request.plan != "off" and plan.request.autotune is None:
        from pipeline.plan.describe import memory_errors, memory_lines

        for sentence in memory_errors(plan):
            raise ConfigError(sentence)
        print_output("\n".join(memory_lines(plan)))
    check_rows(plan, downloads=True)
    if plan.request.deployment_type == "multi_node" and not plan.request.no_check:
        check_machines(plan.layout, plan.request, plan.request.output_dir)
    if plan.layout.rank > 0:
        _run_pod(plan)
        return
    with lock_output(plan.request.output_dir):
        if plan.request.autotune is not None:
            from pipeline.plan.tune import tune

            plan = tune(plan)
        if plan.request.autotune != "tune":
            record_command(plan.request.output_dir, argv)
            run_plan(plan)


def _run_step(plan: Plan, stage: Stage, *, resumes: bool) -> ExitStatus:
    """Run the step's processes; if memory runs out, retry with smaller batches.

    A retry resumes from the newest checkpoint in new processes, so nothing remains of the state
    that ran out of memory; the result is mathematically the same.
    """
    config = plan.configs[stage.name]
    command = plan.command(stage)
    while True:
        status = run_child([*command, *(["--resume"] if resumes else [])], plan.environment)
        if not status.ran_out_of_memory or plan.layout.launcher == "pod":  # a pod can't retry alone
            return status
        planned = memory_summary(plan.memory(stage, config), plan.machine)
        usage = f"; its largest process used {format_bytes(status.peak_bytes)[0]} of host memory"
        print_notice(f"{stage.title} ran out of memory: it was planned to use {planned}{usage}")
        if config.micro_batch_size == 1:
            return status
        sizes = {
            name: max(1, getattr(config, name) // 2)
            for name in ("micro_batch_size", "generation_batch_size")
            if hasattr(config, name)
        }
        config, resumes = replace(config, **sizes), True  # pyrefly: ignore[bad-argument-type]
        command = [*plan.command(stage), *(f"--{name}={size}" for name, size in sizes.items())]
        settings = " ".join(f"--{stage.prefix}.{name} {size}" for name, size in sizes.items())
        print_notice(
            f"{stage.title} continues with {settings}; this needs less memory and more time, and"
            " gives the same result"
        )


def _report_failure(plan: Plan, stage: Stage, status: ExitStatus) -> int:
    """Report a failed step and return its exit code, or 0 if the step is done."""
    out = plan.request.output_dir
    if status.code == EXIT_REQUEUE or status.signal_received in STOP_SIGNALS:
        print_error(f"stopped in {stage.title}; run the same command with --resume to continue")
        raise SystemExit(EXIT_REQUEUE)
    if status.signal_received is not None or status.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(
            f"interrupted in {stage.title}; {out} keeps the finished results; run the same command"
            " with --resume to continue"
        )
    if status.code in (0, EXIT_USER_ERROR):  # the step has printed the error
        return status.code
    if status.code == EXIT_DIVERGED:  # the step has printed the reason and kept its best weights
        is_only_method = stage.method is None
        others = "no later step was started" if is_only_method else "the other methods continue"
        print_error(
            f"{stage.title} diverged, and {others}; to restart it, run the same command with"
            f" --resume and a smaller --{stage.prefix}.{stage.main_role}.optim.lr"
        )
        return EXIT_DIVERGED
    if status.code == EXIT_DISK_FULL:  # the step has printed the error
        print_error(
            f"{stage.title} could not write its results; free disk space, then run the same command"
            " with --resume to continue from its last checkpoint, if any"
        )
        return EXIT_DISK_FULL
    if status.ran_out_of_memory:
        print_error(
            f"{stage.title} ran out of memory. To continue from its last checkpoint, if any, rerun"
            " the command with --resume and either --plan auto or, if it is above 1, a smaller"
            f" --{stage.prefix}.micro_batch_size. To start over, rerun it with --overwrite and a"
            f" smaller --{stage.prefix}.data.max_length."
        )
        return EXIT_OUT_OF_MEMORY
    how = f"was killed by signal {-status.code}" if status.code < 0 else "failed"
    print_error(
        f"{stage.title} {how} (exit code {status.code}): `{shlex.join(plan.command(stage))}`."
        " If memory ran out, try --plan auto. --resume then continues this step."
    )
    return EXIT_FAILED


def _summary_table(plan: Plan) -> Iterator[str]:
    """Yield a table of the steps' results, and the locations of the outputs."""
    from pipeline.report.findings import findings
    from pipeline.report.methods import compare_methods, table
    from pipeline.report.results import find_chat_model, model_directory, read_results

    out = plan.request.output_dir
    results_by_step = read_summary(out)["steps"]
    width = max(14, *(len(name) + 2 for name in results_by_step))
    yield f"\n{'step':<{width}}{'seconds':>9}{'steps':>8}{'tokens':>12}   result"
    for name, result in results_by_step.items():
        numbers = f"{result['seconds']:>9.0f}{result['steps']:>8}{result['tokens']:>12}"
        yield f"{name:<{width}}{numbers}   {_format_metrics(result.get('eval', {}))}"
    results = read_results(out)
    compared = compare_methods(results)
    headline = findings(results)[0].text
    if compared is None or headline != compared.sentence:
        yield f"\n{headline}"
    if compared is not None:
        yield f"\n{table(compared)}"
    yield f"\nreport   {out / REPORT}"
    yield f"numbers  {out / SUMMARY}"
    chat_model = find_chat_model(results.steps)
    if chat_model is not None:
        yield f"chat     {CHAT} --path {shlex.quote(str(model_directory(out, chat_model)))}"
        if all(config.data.path == (EMBEDDED,) for config in plan.configs.values()):
            from pipeline.demo.task import sample_prompts

            yield from (f"try      {prompt}" for prompt in sample_prompts())


def _format_metrics(values: Mapping[str, object]) -> str:
    """Format the first few numbers of an evaluation; summary.json has all of them."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in list(numbers.items())[:4])
