# Curvature along a training run: token cache → training → inspect → measure → samples → summary → figures.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/run.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        SUMMARY,
        # Named too, because Snakemake does not make a missing file again whose dependents are there.
        [plan.samples_path(alias.measured, case) for alias in plan.aliases for case in plan.cases],
        plan.figure_paths if plan.config.analysis.plots else [],


# Ask for this first, then for the rest: every checkpoint is then checked before the first measurement.
rule inspected:
    input:
        [plan.inspect_path(name) for name in plan.checkpoints],


onstart:
    with said_by_workflow():
        if LAUNCHED not in os.environ and not workflow.remote_exec:
            hold_while_running(plan.output)
        claim_output(plan)
    for note in plan.notes if LAUNCHED not in os.environ else ():
        print(f"note: {note}", file=sys.stderr)


onsuccess:
    if LAUNCHED not in os.environ:
        print(closing_words(plan), file=sys.stderr)


onerror:
    print("\n".join(failure_report(plan, since=STARTED, scheduler_logs=SCHEDULER_LOGS)), file=sys.stderr)
