"""Benchmarks: each a module with `measure(quick, say) -> Measured`, loaded when it is run (`asyncrl bench`).

Some take more: `full`, for rows that are not measured by default; `kills`, how many.
"""

BENCHMARKS = {
    "buffer": ("asyncrl.benchmarks.buffer_ops", "What the buffer's guarantees cost against bare GET and SET."),
    "data": ("asyncrl.benchmarks.data", "Files of ten million rows: opened in seconds, in constant memory?"),
    "engines": ("asyncrl.benchmarks.engines", "Tokens/s against generate(), log-probs against the learner."),
    "first-run": ("asyncrl.benchmarks.first_run", "The default run on seeds 0-4: does it learn, how fast."),
    "honest-ages": ("asyncrl.benchmarks.honest_ages", "Is the age bound a bound, and are the versions true?"),
    "learner": ("asyncrl.benchmarks.learner", "A step: packed, shared, against TRL's; memory; checkpoint stalls."),
    "loss": ("asyncrl.benchmarks.loss", "Log-probs at a real vocabulary: memory and time against log_softmax."),
    "memory": ("asyncrl.benchmarks.memory", "A run's memory by plan, against the peak of real runs."),
    "pipeline": ("asyncrl.benchmarks.pipeline", "What the age bound costs, policy by policy, against the model."),
    "resume": ("asyncrl.benchmarks.resume", "kill -9 at random steps, then --resume: the same bits as undisturbed?"),
    "scale": ("asyncrl.benchmarks.scale", "A thousand collectors on one store: tickets/s, p99, memory, waits."),
    "smollm2": ("asyncrl.benchmarks.smollm2", "A real model through an adapter: before, after, in minutes."),
    "soak": ("asyncrl.benchmarks.soak", "kill -9 in every phase of a run: is anything lost, or trained twice?"),
    "staleness": ("asyncrl.benchmarks.staleness", "What old data cost in learning, correction by correction."),
    "sync-vs-async": ("asyncrl.benchmarks.sync_vs_async", "What asynchrony gains at each age, against the model."),
    "verifiers": ("asyncrl.benchmarks.verifiers", "Scores: against a plain math-verify; hanging answers; the sandbox."),
    "vs-trl": ("asyncrl.benchmarks.vs_trl", "Against TRL's GRPOTrainer: same model, prompts and cores."),
    "weights": ("asyncrl.benchmarks.weights", "New weights on their way to the engines, against a memcpy."),
}
"""name -> (module, one line)."""
