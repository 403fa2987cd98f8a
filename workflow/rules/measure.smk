# One checkpoint's state, checked and identified on the CPU; then its curvature, the one rule that wants a GPU.
localrules:
    inspect,


# Before any measurement that is ready at the same time: a damaged checkpoint is better known early.
rule inspect:
    input:
        lambda wildcards: plan.checkpoint_files(wildcards.checkpoint),
        plan.run_directory / "resolved.yaml",
    output:
        plan.inspect_path("{checkpoint}"),
    log:
        LOGS / "inspect" / "{checkpoint}.log",
    priority: 1
    params:
        workers=plan.reads_workers,
    shell:
        "{STEP} inspect --config {CONFIG:q} --checkpoint={wildcards.checkpoint:q} --log {log:q}"


# The inspect record stands for the checkpoint: a file that was merely touched costs a hash and no measurement.
rule measure:
    input:
        plan.inspect_path("{checkpoint}"),
        plan.cache_directory / "manifest.json",
    output:
        plan.measure_path("{checkpoint}", "{case}", "{shard}"),
    log:
        LOGS / "measure" / "{checkpoint}.{case}.{shard}.log",
    benchmark:
        LOGS / "measure" / "{checkpoint}.{case}.{shard}.benchmark.tsv"
    threads: granted_threads()
    resources:
        **estimated(measure_estimate),
        gpu=plan.gpus(plan.config.analysis.device),
    params:
        settings=plan.digest,
    shell:
        "exec {STEP} measure --config {CONFIG:q} --settings {params.settings} --checkpoint={wildcards.checkpoint:q}"
        " --case {wildcards.case} --shard {wildcards.shard} --threads {threads} {ALONE} --log {log:q}"
