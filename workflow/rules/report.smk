# Records → samples of each (checkpoint, case) → manifest and summary → figures.
localrules:
    samples,
    summary,
    figures,


rule samples:
    input:
        lambda wildcards: [plan.measure_path(wildcards.checkpoint, wildcards.case, shard) for shard in plan.shards],
        lambda wildcards: [plan.inspect_path(name) for name in plan.alias_of(wildcards.checkpoint).members],
    output:
        plan.samples_path("{checkpoint}", "{case}"),
    log:
        LOGS / "samples" / "{checkpoint}.{case}.log",
    params:
        settings=plan.digest,
        aliases=lambda wildcards: plan.alias_of(wildcards.checkpoint).members,
    shell:
        "{STEP} samples --config {CONFIG:q} --checkpoint={wildcards.checkpoint:q} --aliases {params.aliases}"
        " --case {wildcards.case} --log {log:q}"


rule summary:
    input:
        [plan.samples_path(alias.measured, case) for alias in plan.aliases for case in plan.cases],
        [plan.inspect_path(name) for name in plan.checkpoints],
    output:
        report(SUMMARY[0], category="Data", caption="../report/manifest.rst"),
        report(SUMMARY[1], category="Data", caption="../report/summary.rst"),
    log:
        LOGS / "summary.log",
    params:
        rows=list(plan.checkpoints),
    shell:
        "{STEP} summary --config {CONFIG:q} --log {log:q}"


rule figures:
    input:
        SUMMARY,
    output:
        [
            report(
                path,
                category="Figures",
                caption=f"../report/{path.stem}.rst",
                labels={"figure": path.stem, "format": path.suffix[1:]},
            )
            for path in plan.figure_paths
        ],
    log:
        LOGS / "figures.log",
    params:
        training_norms=plan.config.analysis.training_norms,
    shell:
        "{STEP} figures --config {CONFIG:q} --log {log:q}"
