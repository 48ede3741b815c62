"""Every mistake a person makes in a recipe: one short message with key, value and fix."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Refusal = Callable[..., str]

MISTAKES = {
    "task: {type: a:B, memory_limit: 64MiB}": ("task.memory_limit is 64MiB", "Use 256MiB or more"),
    "task: {type: a:B, step_timeout_s: 300}": ("task.step_timeout_s is 300", "Make it less"),
    "task: {type: agent, data: {train: a.jsonl}}": ("neither task.agent nor task.command", "write one"),
    "task: {type: agent, data: {train: a.jsonl}, agent: a:b, command: [c]}": ("both task.agent and task.command",),
    "task: {type: agent, data: {train: a.jsonl}, agent: a.py}": ('task.agent is "a.py"', "my_agent:run"),
    "task: {type: agent, data: {train: a.jsonl}, command: []}": ("task.command is []", "write a program first"),
    "{task: {type: agent, data: {train: a}, agent: a:b}, collector: {endpoint: {host: ''}}}": (
        "endpoint.host is empty",
    ),
    "task: {type: agent, agent: a:b}": ("task.data is missing",),
    # mixtures and curricula
    "task: {type: mixture}": ("task.tasks is missing",),
    "task: {type: mixture, tasks: []}": ("task.tasks has 0 of the tasks", "two or more"),
    "task: {type: mixture, tasks: [{task: {type: reverse}}]}": ("task.tasks has 1 of the tasks", "two or more"),
    "task: {type: mixture, tasks: [{task: {type: reverse}}, {task: {type: reverse}}]}": (
        "task.tasks[1] and task.tasks[0] are both called reverse",
        "a `name` of its own",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse}}, {name: a/b, task: {type: reverse}}]}": (
        'task.tasks[1].name is "a/b"',
        "Use letters",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse}, weight: 0}, {task: {type: uppercase}}]}": (
        "task.tasks[0].weight is 0",
        "more than 0",
    ),
    "task: {type: mixture, tasks: [{task: {type: mixture}}, {task: {type: uppercase}}]}": (
        'task.tasks[0].task.type is "mixture"',
        "must be one of reverse",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse}}, {task: {type: agent, data: {train: a}}}]}": (
        "task.tasks[1].task has neither task.tasks[1].task.agent nor task.tasks[1].task.command",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse}}, {name: b, task: {type: a:B, step_timeout_s: 900}}]}": (
        "task.tasks[1].task.step_timeout_s is 900",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse}}, {task: {type: reverse, digits: [9, 3]}, name: b}]}": (
        "task.tasks[1].task.digits is [9, 3]",
        "the shorter length first",
    ),
    "task: {type: mixture, tasks: [{task: {type: reverse, rewards: [{type: length, target_tokens: 99}]}}, "
    "{task: {type: uppercase}}]}": ("task.tasks[0].task.rewards[0].target_tokens is 99",),
    "task: {type: mixture, tasks: [{task: {type: reverse, rewards: [{type: function, name: p, function: a:b}]}}, "
    "{task: {type: uppercase, rewards: [{type: format, name: p, pattern: x}]}}]}": (
        "task.tasks[1].task.rewards has p as constraint, and another task of the mixture as outcome",
        "a `name` of its own",
    ),
    "task: {chat_template_args: {tools: []}}": ("task.chat_template_args has tools", "enable_thinking"),
    "task: {curriculum: {max: 0.5}}": ("task.curriculum.pass_rates is missing",),
    "task: {curriculum: {pass_rates: a.json, min: 0.5, max: 0.2}}": (
        "task.curriculum.min is 0.5",
        "smaller one as min",
    ),
    "task: {curriculum: {pass_rates: a.json}}": ("leaves every row where it is", "task.curriculum.max: 0.9"),
    "task: {curriculum: {pass_rates: a.json, max: 1.5}}": ("task.curriculum.max is 1.5",),
    # unknown keys
    "learner: {learning_rat: 1}": ("learner.learning_rat", "learner.learning_rate?"),
    "objective: {learning_rate: 1}": ("objective.learning_rate", "learner.learning_rate?"),
    "run: {lerning_rate: 1}": ("run.lerning_rate", "learner.learning_rate?"),
    "lerner: {learning_rate: 1}": ("lerner is not", "Did you mean learner?"),
    "learner: {zzz: 1}": ("learner.zzz", "learner has: ranks, devices, groups_per_step"),
    "zzz: {a: 1}": ("zzz is not", "A recipe has: extends, run, model"),
    # other systems' keys
    "collector: {num_generations: 8}": (
        "collector.num_generations is not",
        "num_generations is a name of TRL",
        "here: collector.group_size",
    ),
    "num_generations: 8": ("num_generations is a name of TRL", "here: collector.group_size"),
    "grpo: {num_prompts_per_step: 8}": ("grpo.num_prompts_per_step is a name of NeMo", "learner.groups_per_step"),
    "actor_rollout_ref: {rollout: {n: 8}}": ("actor_rollout_ref.rollout.n is a name of verl", "collector.group_size"),
    "max_off_policy_steps: 8": ("max_off_policy_steps is a name of prime-rl", "here: buffer.max_trajectory_age"),
    "beta: 0.1": ("beta is not a key", "Did you mean objective.beta?"),
    "kl_loss_coef: 0.1": ("kl_loss_coef is a name of verl", "here: objective.beta"),
    "eval_steps: 5": ("eval_steps is a name of TRL", "here: eval.every_steps"),
    # keys, types and values of a later version
    "objective: {beta: -0.1}": ("objective.beta is -0.1", "0 or more"),
    "objective: {entropy: -0.1}": ("objective.entropy is -0.1", "0 or more"),
    "objective: {beta_estimator: k2}": ("objective.beta_estimator is k2", "objective.beta is 0"),
    "objective: {beta: 0.1, beta_estimator: k4}": ("objective.beta_estimator", "k1, k2, k3"),
    "telemetry: {prometheus: {}}": ("telemetry", "does not have it yet; remove it"),
    "learner: {parallel: {fsdp: 4}}": ("learner.parallel", "does not have it yet; remove it"),
    "collector: {engine: {type: sglang}}": ("collector.engine.url is missing",),
    "collector: {engine: {type: sglang, url: 'http://h:1'}}": ("weights.update is keep", "weights.update: recompute"),
    "weights: {update: drain}\ncollector: {engines: 2, engine: {type: sglang, url: 'http://h:1'}}": (
        "collector.engines is 2",
    ),
    "weights: {update: drain}\ncollector: {engine: {type: sglang, url: 'http://h:1'}, sampling: {temperature: 0.7}}": (
        "collector.sampling.temperature is 0.7",
        "Use 1.0",
    ),
    "weights: {update: drain}\ncollector: {engine: {type: sglang, url: 'http://h:1'}, sampling: {top_k: 50}}": (
        "collector.sampling.top_k is 50",
        "Use -1",
    ),
    "collector: {engine: {type: vllm}, sampling: {temperature: 2.5}}": ("temperature is 2.5", "0.01 to 2"),
    "collector: {engine: {type: vllm}, sampling: {top_k: 50, top_p: 0.9, min_p: 0.1}}": ("vLLM applies min_p first",),
    "collector: {engine: {gpu_memory_utilization: 0.5}}": ("belongs to type vllm", "this engine is transformers"),
    "collector: {engine: {type: vllm, slots: 8}}": ("collector.engine.slots belongs to type transformers",),
    "collector: {engine: {type: vllm, kv_cache_memory_bytes: 4 potatoes}}": ("kv_cache_memory_bytes", "such as 4GiB"),
    "collector: {engine: {type: vllm, extra_args: {dtype: half}}}": ("extra_args.dtype", "model.dtype"),
    "collector: {engine: {type: vllm, extra_args: {quantization: fp8}}}": ("extra_args.quantization", "read back"),
    "collector: {engine: {type: vllm-server}}": ("collector.engine.url is missing",),
    "collector: {engine: {type: vllm-server, url: 'localhost:8000'}}": (
        "collector.engine.url",
        "http://127.0.0.1:8000",
    ),
    "collector: {engine: {type: vllm-server, url: 'http://:s3cret@h:1'}}": (":***@h:1", "collector.engine.api_key_env"),
    "collector: {engines: 2, engine: {type: vllm-server, url: 'http://h:1'}}": (
        "collector.engines is 2",
        "another server",
    ),
    "run: {deterministic: true}\ncollector: {engine: {type: vllm-server, url: 'http://h:1'}}": (
        "run.deterministic is true",
    ),
    "run: {deterministic: true}\ncollector: {engine: {type: vllm}}": ("run.deterministic is true", "transformers"),
    "objective: {preset: dappo}": ("objective.preset", '"dappo"', "Did you mean dapo?"),
    "objective: {mask: {type: dppo}}": ("objective.mask.type", '"dppo"', "Did you mean dppo-tv?"),
    "objective: {mask: dppo-tv}": ("objective.mask", '"dppo-tv"', "a mapping, or a list of mappings"),
    "objective: {mask: [{type: k3, delta: 1}]}": ("objective.mask[0].delta", "belongs to type opsm"),
    "objective: {mask: {type: token-age}}": ("objective.mask.max_age is missing",),
    "objective: {mask: [{type: k3}, {type: k3}]}": ("objective.mask has k3 twice",),
    "objective: {importance_weight: {type: token-tis}}": (
        "objective.importance_weight is token-tis",
        "counted twice",
        "objective.proximal: behaviour-version",
    ),
    "objective: {preset: async, importance_weight: {type: sequence-mis}}": ("surrogate cispo", "counted twice"),
    "objective: {preset: rloo, proximal: behaviour-version}": ("reinforce has no ratio", "ppo-clip"),
    "objective: {preset: rloo, epsilon: 0.2}": ("objective.epsilon is 0.2", "reinforce clips nothing"),
    "objective: {preset: gspo, dual_clip: 10}": ("objective.dual_clip is 10", "which the surrogate gspo has not"),
    "objective: {preset: grpo, dual_clip: 1.2}": ("objective.dual_clip is 1.2", "inside the clip", "such as 10"),
    "objective: {surrogate: reinforce, importance_weight: {type: token-icepop, low: 2}}": (
        "objective.importance_weight has low 2",
        "must lie between them",
    ),
    "objective: {mask: {type: geometric-sequence, high: 0.999}}": ("objective.mask has low 0.99", "between them"),
    "objective: {preset: gspo, mask: {type: dppo-tv}}": ("the surrogate gspo", "objective.mask dppo-tv would take"),
    "objective: {preset: rloo, mask: {type: token-age, max_age: 1}}": (
        "importance weight sequence-tis",
        "objective.mask token-age would take",
    ),
    "{objective: {preset: gspo}, buffer: {over_age: mask}}": ("the surrogate gspo", "buffer.over_age mask would take"),
    "objective: {aggregation: prompt, mask: {type: k3}}": ("aggregation is prompt", "mask k3 is decided", "token-age"),
    "objective: {aggregation: prompt}": ("objective.mask dppo-tv (of preset async) is decided by the weights",),
    "objective: {surrogate: gspo}": ("the surrogate gspo", "objective.mask dppo-tv (of preset async) would take"),
    "buffer: {over_age: masked}": ("buffer.over_age", "drop, mask, requeue, wait", "Did you mean mask?"),
    # wrong types and ranges
    'learner: {groups_per_step: "8"}': ("learner.groups_per_step", '"8"', "whole number", "8 without quotes"),
    'learner: {learning_rate: "1e-6"}': ("learner.learning_rate", '"1e-6"', "a number", "1e-6 without quotes"),
    "learner: {groups_per_step: true}": ("learner.groups_per_step is true", "whole number of 1 or more", "it is 16"),
    "learner: {groups_per_step: 8.0}": ("learner.groups_per_step is 8.0", "Write 8"),
    "learner: {groups_per_step: 0}": ("learner.groups_per_step is 0", "1 or more"),
    "learner: {learning_rate: -1}": ("learner.learning_rate is -1", "more than 0"),
    "learner: {learning_rate: .nan}": ("learner.learning_rate is .nan", "finite"),
    "run: {grace_s: .inf}": ("run.grace_s is .inf", "finite"),
    "run: {max_steps: 99999999999999999999}": ("run.max_steps", "64 bits"),
    "run: {name: 5}": ("run.name is 5", '"5" in quotes'),
    "eval: {at_start: yes}": ("eval.at_start", '"yes"', "true or false", "Write true"),
    "model: {dtype: float16}": ("model.dtype", '"float16"', "bfloat16, float32"),
    "model: {dtype: bfloat-16}": ("model.dtype", '"bfloat-16"', "Did you mean bfloat16?"),
    "buffer: {lookahead: 3}": ("buffer.lookahead is 3", "1 or more and at most 2"),
    "buffer: {max_trajectory_age: -1}": ("buffer.max_trajectory_age is -1", "0 or more (0 is synchronous)"),
    "buffer: {max_bytes: 4gb}": ("buffer.max_bytes", '"4gb"', "GiB"),
    "buffer: {max_bytes: 0}": ("buffer.max_bytes is 0", "1 or more"),
    "task: {digits: [3]}": ("task.digits is [3]", "a list of 2", "[3, 6]"),
    "task: {digits: [3, x]}": ("task.digits", "a list of 2"),
    "run: 5": ("run is 5", "must be a mapping"),
    "- a": ("mine.yaml", "a mapping of sections"),
    # unions
    "task: {type: revers}": (
        "task.type",
        '"revers"',
        "reverse, uppercase, errands, single-turn, ",
        ", module:Class",
        "Did you mean reverse?",
    ),
    "task: {type: 5}": ("task.type is 5", "module:Class"),
    "task: {type: 'my task:X'}": ("task.type", '"my task:X"', "module:Class"),
    "task: {type: single-turn}": ("task.data is missing",),
    "task: {type: single-turn, data: {}}": ("task.data.train is missing",),
    "task: {type: reasoning-gym}": ("task.datasets is missing",),
    "task: {type: reasoning-gym, datasets: []}": ("task.datasets is []", "spell_backward"),
    "task: {type: reasoning-gym, datasets: [{name: lcm}, {name: lcm}]}": ('task.datasets has "lcm"', "twice"),
    "task: {type: reasoning-gym, datasets: {name: lcm, config: {seed: 1}}}": (
        "task.datasets[0].config has seed",
        "task.heldout_rows",
    ),
    "task: {type: reasoning-gym, datasets: {name: lcm, weight: 0}}": ("task.datasets.weight is 0", "more than 0"),
    "task: {type: verifiers}": ("task.environment is missing",),
    "task: {type: verifiers, environment: ''}": ("task.environment is empty", "reverse_text"),
    "task: {type: verifiers, environment: a, args: {id: b}}": ("task.args.id is", "write it as task.environment"),
    "task: {type: verifiers, environment: a, heldout_args: {task: {}}}": ("task.heldout_args.task", "task.args"),
    "task: {type: verifiers, environment: a, env: {taskset: {}}}": ("task.env.taskset", "as task.args"),
    "task: {data: {train: x.jsonl}}": ("task.data belongs to type single-turn", "write `type: single-turn` first"),
    "collector: {engine: {type: transformers, token_s: 1}}": (
        "collector.engine.token_s belongs to type simulated",
        "this engine is transformers",
    ),
    "collector: {engine: vllm}": ("collector.engine", "a mapping that starts with `type:`"),
    # rules that cross keys
    "learner: {ranks: 17}": ("learner.ranks is 17", "16 groups", "Use 16 ranks or fewer"),
    "run: {deterministic: true}\nlearner: {ranks: 2}": ("run.deterministic is true", "learner.ranks 2", "Use one rank"),
    "learner: {updates_per_step: 17}": ("learner.updates_per_step is 17", "16 groups", "Use 16 or less"),
    "learner: {updates_per_step: 5, ranks: 5}": ("learner.ranks is 5", "at most 4 groups", "Use 4 ranks or fewer"),
    "learner: {updates_per_step: 0}": ("learner.updates_per_step is 0", "1 or more"),
    "learner: {ppo_mini_batch_size: 8}": ("ppo_mini_batch_size is a name of verl", "learner.updates_per_step"),
    "learner: {ranks: 0}": ("learner.ranks is 0", "1 or more"),
    "collector: {group_size: 1}": ("collector.group_size is 1", "objective.advantage", "Use 2 or more"),
    "collector: {min_members: 1}": ("collector.min_members is 1", "2 or more, or null"),
    "collector: {min_members: 9}": ("collector.min_members is 9", "8 members", "at most that"),
    "collector: {sampling: {top_p: 0.9}}": ("collector.sampling.top_p is 0.9 without top_k", "top_k: 50"),
    "collector: {sampling: {min_p: 0.1}}": ("collector.sampling.min_p is 0.1 without top_k", "top_k: 50", "min_p: 0.0"),
    "collector: {sampling: {top_p: 0}}": ("collector.sampling.top_p is 0", "more than 0 and at most 1"),
    "collector: {sampling: {min_p: 1.5}}": ("collector.sampling.min_p is 1.5", "at most 1"),
    "collector: {sampling: {top_k: 0}}": ("collector.sampling.top_k is 0", "1 to 4096, or -1"),
    "collector: {sampling: {top_k: 5000}}": ("collector.sampling.top_k is 5000", "1 to 4096, or -1"),
    "collector: {sampling: {min_tokens: 8}}": ("collector.sampling.min_tokens is 8", "max_tokens 8", "use less"),
    "collector: {sampling: {stop: ['.', '']}}": ("collector.sampling.stop", "end every completion at once"),
    "collector: {sampling: {stop: '.'}}": ("collector.sampling.stop", "list"),
    "collector: {score_timeout_s: 400}": ("collector.score_timeout_s is 400", "collector.group_timeout_s 300"),
    "run: {no_progress_s: 100}": ("collector.group_timeout_s is 300", "run.no_progress_s 100"),
    "buffer: {max_uses: 3}": ("buffer.max_uses is 3", "max_trajectory_age 1", "max_trajectory_age + 2 = 3"),
    "buffer: {max_uses: 2, min_fresh: 0.6}": ("buffer.min_fresh is 0.6", "fresh once", "Lower min_fresh to 0.5"),
    "buffer: {max_uses: 2, min_fresh: 0.5}\nlearner: {groups_per_step: 1}": (
        "buffer.min_fresh is 0.5",
        "groups_per_step 1",
        "no place is left",
    ),
    "buffer: {min_fresh: 2}": ("buffer.min_fresh is 2", "at most 1"),
    "buffer: {max_empty_fills: 0}": ("buffer.max_empty_fills is 0", "1 or more"),
    "buffer: {dynamic_sampling: yes}": ("buffer.dynamic_sampling", "true or false", "Write true"),
    "{eval: {every_steps: 3}, weights: {publish_every: 2}}": (
        "eval.every_steps is 3",
        "multiples of",
        "publish_every 2",
    ),
    "eval: {n: 4, sampling: {temperature: 0}}": ("eval.n is 4", "Use eval.n: 1"),
    "eval: {data: a.jsonl}": ("eval.data is", "task.type reverse reads no data files"),
    "{eval: {data: a.jsonl}, task: {type: single-turn, data: {train: b.jsonl, heldout: c.jsonl}}}": (
        "task.data.heldout",
        "Leave one of them out",
    ),
    "eval: {sampling: {top_p: 0.9}}": ("eval.sampling.top_p is 0.9 without top_k", "top_k too"),
    "eval: {sampling: {top_k: 0}}": ("eval.sampling.top_k is 0", "-1 for all"),
    "{eval: {sampling: {max_tokens: 64}}, model: {max_length: 64}}": ("eval.sampling.max_tokens is 64", "leave room"),
    "eval: {metric: accuracy}": ("eval.metric is", "write reward, pass@K or majority@N"),
    "eval: {metric: pass@4}": ("eval.metric is pass@4", "pass@1 is measured"),
    "eval: {n: 2, metric: majority@2}": ("eval.metric is majority@2", "Write eval.n: 3"),
    "eval: {save_best: pass@1}": ("eval.save_best is not",),
    "learner: {checkpoint: {keep_best: 1}}": ("keep_best is 1, but nothing says", "eval.every_steps: 20"),
    "{learner: {checkpoint: {keep_best: 1, every_steps: 4}}, eval: {every_steps: 6}}": (
        "keep_best is 1",
        "eval.every_steps 6",
        "checkpoint.every_steps 4",
        "a multiple of 4",
    ),
    "learner: {checkpoint: {keep_every: 30}}": ("keep_every is 30", "multiples of", "every_steps 20"),
    "weights: {publish_every: 3}": ("weights.publish_every is 3", "max_trajectory_age 1", "Use 2 or less"),
    "weights: {transport: file}": ("weights.transport is file", "weights.url", "s3://"),
    "weights: {transport: delta}": ("weights.transport is delta", "weights.url", "s3://"),
    "weights: {url: /w}": ("weights.url", "/w", "weights.transport auto does not use it", "weights.fallback"),
    "weights: {transport: file, url: /w, fallback: {url: /v}}": ("weights.fallback", "stand in for", "Leave it out"),
    "weights: {transport: delta, url: /w, fallback: {url: /w}}": ("weights.fallback.url", "a place of its own"),
    "weights: {transport: file, url: 'sftp://me:s3cret@h/w'}": ("weights.url", "me:***@h", "through the environment"),
    "weights: {fallback: {transport: shm, url: /w}}": ("weights.fallback.transport", '"shm"', "file"),
    "weights: {fallback: {transport: file}}": ("weights.fallback.url is missing",),
    "weights: {transport: delta, url: /w, verify_every: 2}": ("weights.verify_every is 2", "delta", "Use 1"),
    "weights: {lora: adapter}": ("weights.lora is adapter", "model.lora is null", "model.lora: {r: 16}"),
    "{weights: {lora: adapter}, model: {lora: {r: 4}}, collector: {engine: {type: simulated}}}": (
        "weights.lora is adapter",
        "collector.engine.type simulated",
        "Leave weights.lora out",
    ),
    "weights: {interface: nope0}": ("weights.interface", '"nope0"', "no such network interface. It has", "lo"),
    "weights: {port: 70000}": ("weights.port is 70000", "at most 65535"),
    "weights: {anchor_every: 0}": ("weights.anchor_every is 0", "1 or more"),
    "weights: {transport: nccl}": ("weights.transport", '"nccl"', "collective"),
    "buffer: {max_bytes: 1MiB}": ("buffer.max_bytes is 1MiB", "32 groups", "bytes each", "Raise buffer.max_bytes"),
    "model: {max_length: 8}": ("collector.sampling.max_tokens is 8", "model.max_length 8"),
    "task: {digits: [6, 3]}": ("task.digits is [6, 3]", "shorter length first"),
    "task: {digits: [3, 9]}": ("collector.sampling.max_tokens is 8", "10 or more"),
    "task: {type: single-turn, data: {train: mine.yaml}, rewards: []}": ("task.rewards is []", "type: exact"),
    "task: {type: single-turn, data: {train: mine.yaml}, rewards: [{type: length, target_tokens: 2}]}": (
        "task.rewards has length only",
        "whether an answer is right",
    ),
    "task: {rewards: [{type: exact}]}": ("task.rewards", "exact", "task.type reverse", "name"),
    "task: {rewards: [{type: overlong, buffer_tokens: 2}, {type: overlong, buffer_tokens: 3}]}": (
        "task.rewards has overlong twice",
        "Keep one",
    ),
    "task: {rewards: [{type: overlong, buffer_tokens: 8}]}": ("buffer_tokens is 8", "max_tokens 8", "Use less"),
    "task: {rewards: [{type: code, total_timeout_s: 10}]}": ("total_timeout_s is 10", "score_timeout_s 10", "1 s less"),
    "task: {rewards: [{type: code, timeout_s: 5}]}": ("total_timeout_s is 8", "rewards[0].timeout_s 5", "1 s less"),
    "task: {rewards: [{type: code, test_timeout_s: 9}]}": ("test_timeout_s is 9", "total_timeout_s 8", "Use less"),
    "task: {rewards: [{type: code, memory_limit: 1MiB}]}": ("memory_limit is 1MiB", "Use 64MiB or more"),
    "task: {rewards: [{type: code, memory_limit: big}]}": ('memory_limit is "big"', "such as 4GiB"),
    "task: {rewards: [{type: code, modules: [num-py]}]}": ('modules has "num-py"', "such as numpy"),
    "task: {rewards: [{type: length, target_tokens: 9}]}": ("target_tokens is 9", "max_tokens 8", "8 or less"),
    "task: {rewards: [{type: length, pattern: x}]}": ("rewards[0].pattern belongs to type format", "is length"),
    "task: {rewards: [{type: format, pattern: '('}]}": ("rewards[0].pattern", "unterminated subpattern at position 0"),
    "task: {rewards: [{type: format, pattern: 'a{99999999999}'}]}": ("rewards[0].pattern", "repetition number"),
    "task: {reward_clip: [1, -1]}": ("task.reward_clip is [1.0, -1.0]", "lower bound first"),
    "task: {reward_clip: [0, 1]}\nobjective: {preset: gdpo}": ("task.reward_clip", "gdpo", "never looks at their sum"),
    "task: {reward_scale: 0}": ("task.reward_scale is 0", "more than 0"),
    "learner: {betas: [0.9, 1.0]}": ("learner.betas is [0.9, 1.0]", "less than 1"),
    "run: {name: 'a b'}": ("run.name", '"a b"', "letters, digits"),
    # what is not there
    "task: {type: single-turn, data: {train: nope.jsonl}}": ("task.data.train", '"nope.jsonl"', "no such file"),
    "model: {path: ./nope}": ("model.path", '"./nope"', "no such folder", "builtin:tiny"),
    "model: {path: 'builtin:small'}": ("model.path", '"builtin:small"', "builtin:tiny"),
    "extends: nope": ("'nope'", "tiny-reverse", "mine.yaml"),
    "extends: ./nope.yaml": ("nope.yaml", "mine.yaml", "tiny-reverse"),
    "extends: 5": ("extends is 5", "a path"),
    # the store's URL
    "buffer: {url: http://x}": ("buffer.url", '"http://x"', "redis://"),
    "buffer: {url: 'redis://'}": ("buffer.url", '"redis://"', "no host"),
    "buffer: {url: 'redis://h:x/0'}": ("buffer.url", "not a URL"),
    "buffer: {url: 'unix://rel/path'}": ("buffer.url", "absolute path"),
    "buffer: {url: memory://}": ("buffer.url", "inside one process", "embedded"),
    # text that is not YAML
    "run:\n  seed: 1\n  seed: 2": ("mine.yaml, line 3", "`seed` stands twice", "line 2", "remove one"),
    "run: {seed: [1": ("mine.yaml, line 1",),
    "run: {name: ${X}}": ("mine.yaml, line 1", 'write "${NAME}" in quotes'),
    "1: a": ("mine.yaml", "the key 1", "quotes"),
    "a: &a [*a]": ("mine.yaml", "nested deeper"),
    "a: " + "[" * 3000: ("mine.yaml", "nested deeper"),
    "run: {name: !!python/name:os.system x}": ("mine.yaml, line 1", "tag"),
    "run: {name: !!binary aGk=}": ("run.name", "bytes"),
    "\0": ("mine.yaml",),
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:60].encode("unicode_escape").decode())
def test_a_mistake_is_refused_with_key_value_and_fix(refusal: Refusal, text: str) -> None:
    message = refusal(text)
    for part in MISTAKES[text]:
        assert part in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("learner", ("--set 'learner'", "section.key=value")),
        ("=1", ("--set '=1'", "section.key=value")),
        ("task.digits[0]=1", ("task.digits[0]=1", "--set 'task.digits=[3, 4]'")),
        ("learner.learning_rate=[1", ("--set learner.learning_rate", "not YAML")),
        ("learner.learning_rat=1", ("learner.learning_rat", "learner.learning_rate?")),
        ("buffer=5", ("buffer is 5", "a mapping")),
        ("extends=tiny-reverse", ("extends", "cannot be set")),
    ],
)
def test_a_bad_override_is_refused(refusal: Refusal, override: str, parts: tuple[str, ...]) -> None:
    message = refusal(overrides=[override])
    for part in parts:
        assert part in message


def test_a_negative_age_by_flag_names_the_key(refusal: Refusal) -> None:
    assert "buffer.max_trajectory_age is -1" in refusal(flags={"max_trajectory_age": -1})


def test_a_password_is_not_quoted_in_an_error(refusal: Refusal) -> None:
    message = refusal("buffer: {url: 'reddis://user:pa/s@s@host/0'}")
    assert "pa/s" not in message
    assert "reddis://user:***@host/0" in message
