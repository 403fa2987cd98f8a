# The run itself, where the configuration owns it: text → token cache → training.
if plan.config.owned:

    localrules:
        token_cache,

    # Library sources and text files are no inputs: an update of Python must not retrain.
    rule token_cache:
        output:
            plan.cache_directory / "manifest.json",
        log:
            LOGS / "token_cache.log",
        benchmark:
            LOGS / "token_cache.benchmark.tsv"
        threads: granted_threads()
        params:
            request=plan.preparation_digest,
        shell:
            "{STEP} prepare --config {CONFIG:q} --threads {threads} {ALONE} --log {log:q}"

    rule train:
        input:
            plan.cache_directory / "manifest.json",
        output:
            plan.trained_paths,
        log:
            LOGS / "train.log",
        benchmark:
            LOGS / "train.benchmark.tsv"
        threads: granted_threads()
        resources:
            **estimated(training_estimate),
            gpu=plan.gpus(plan.recipe.runtime.device),
        params:
            recipe=plan.recipe_digest,
        shell:
            "exec {STEP} train --config {CONFIG:q} --threads {threads} {ALONE} --log {log:q}"

    rule prepared:
        input:
            rules.token_cache.output,

    rule trained:
        input:
            rules.train.output,
