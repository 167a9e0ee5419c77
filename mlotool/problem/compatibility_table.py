"""The table of what cannot go together.

A row names two features, the setting to change, what it should be and why. A `Case` is one problem with what it is
combined with; a row holds for it where both of its features do. `compatibility.py` makes messages of the rows, and
`compatibility_page.py` makes docs/compatibility.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Two features that do not go together.

    The texts may name `{name}`, `{solution}`, `{reader}`, `{read}` and `{algorithm}` of the case.

    Args:
        first: a key of FEATURES.
        second: another one.
        key: the setting to change, behind `problems.<name>.`.
        expected: after "expected".
        reason: after "since".
        advice: what to do; "" says to correct the setting.
        is_refused: False where the second feature is left out instead, and the run goes on.
    """

    first: str
    second: str
    key: str
    expected: str
    reason: str
    advice: str = ""
    is_refused: bool = True


_LAYER_PARALLEL = "layer-parallel stages run the module in parts, in fp32 or bf16, for one set of parameters"
_IMPLICIT = "Write hypergradient: finite_difference, or remove parallel."
_USE_CG = (
    "Write +hypergradient@problems.{name}.hypergradient=cg, or set curvature: partial on the problem that both shapes "
    "and reads."
)
_BOTH = ("trace", "fuse")
_ABOVE = "a problem above both shapes and reads '{name}', so its pullback is differentiated"

ROWS: tuple[Row, ...] = (
    Row("tasks", "compile", "compile", "false", "tasks run through torch.vmap"),
    Row("tasks", "shard", "shard", "false", "tasks divide the batch by themselves"),
    Row("tasks", "parallel", "tasks", "null", _LAYER_PARALLEL),
    Row(
        "tasks",
        "draws",
        "tasks",
        "null",
        "its module draws a path by values, and torch.vmap computes all tasks as one program",
        "Set it to null, or mix the candidates: mlotool.spaces.PathWeights.",
    ),
    Row(
        "compile",
        "draws",
        "compile",
        "false",
        "its module draws a path for each mini-batch, and torch.compile has random numbers of its own and another "
        "program for each path",
        "Set it to false.",
    ),
    Row(
        "tasks",
        "ranks",
        "tasks",
        "null",
        "the tasks are the batch's first axis, which ranks would divide",
        "Set runner.devices=1.",
    ),
    *(
        Row("shard", other, "shard", "false", reason)
        for other, reason in (
            ("compile", "torch.compile cannot trace what gathers the shards"),
            ("fp16", "the loss scale of fp16 needs whole gradients; bf16 needs none"),
            ("reset_to", "reset_to copies whole parameters"),
            ("optimizer_roles", "other problems give its optimizer's settings"),
            ("parallel", _LAYER_PARALLEL),
            ("line_search", "a line search compares values at parameters that are divided"),
        )
    ),
    Row(
        "shard",
        "hypergradient",
        "shard",
        "false, or first_order as the hypergradient of '{solution}'",
        "the gradient of '{reader}' passes through that solution by {algorithm}, and sharded parameters have no second "
        "derivatives (FSDP2 frees what they need)",
        "Write hypergradient: first_order, or problems.{name}.shard: false.",
    ),
    Row(
        "parts",
        "shard_all",
        "shard",
        "false, or patterns of the names of the parameters that are divided",
        "ranks that run different paths would wait for each other's shards",
        "Write problems.{name}.shard: ['<pattern>'] for large candidates.",
    ),
    *(
        Row(
            "parts",
            steps,
            "hypergradient",
            "an implicit hypergradient, or first_order",
            "on several ranks the steps of '{name}' follow means over the ranks that used a parameter, and {algorithm} "
            "knows only steps that follow the mean over all ranks",
            "Write hypergradient: cg, another implicit one, or first_order; or runner.devices=1.",
        )
        for steps in ("unrolled", "directing")
    ),
    Row(
        "ranks",
        "path_statistics",
        "module.statistics",
        "shared",
        "ranks average running statistics after each step, those of paths that they have not run included",
        "Write statistics: shared, and evaluate.recalibrate: 20; or runner.devices=1.",
    ),
    Row("parallel", "compile", "compile", "false", _LAYER_PARALLEL),
    Row("blocks", "compile", "remat", "null", "torch.compile decides by itself what a backward pass computes again"),
    Row("blocks", "shard", "remat", "null", "a block that is evaluated again would have to gather its shards again"),
    Row("blocks", "parallel", "remat", "null", _LAYER_PARALLEL),
    Row("parallel", "fp16", "precision", "fp32 or bf16", _LAYER_PARALLEL),
    Row(
        "parallel",
        "directing",
        "hypergradient",
        "an implicit hypergradient",
        "it makes the steps of '{name}' from gradients of its loss that it keeps, and layer-parallel steps follow "
        "others",
        _IMPLICIT,
    ),
    Row(
        "parallel",
        "unrolled",
        "hypergradient",
        "an implicit hypergradient",
        "it takes the steps of '{name}' again, and layer-parallel steps follow other gradients than the loss's",
        _IMPLICIT,
    ),
    Row(
        "auxiliary",
        "line_search",
        "optimizer",
        "one that steps along one gradient",
        "each evaluation moves auxiliary variables",
    ),
    Row(
        "processes",
        "clip",
        "gradient_clip_norm",
        "null",
        "no process has the whole gradient, whose norm it is",
        "Set it to null, or parallel.processes=false.",
    ),
    Row(
        "processes",
        "same_batch",
        "same_batch_as",
        "null",
        "all stages need the same samples, which are divided otherwise",
        "Give it a stream, or set parallel.processes=false.",
    ),
    Row(
        "processes",
        "reads",
        "parallel.processes",
        "false",
        "gradients pass through the solution of '{read}' in its loss, which one process alone evaluates",
        "Set parallel.processes=false.",
    ),
    *(
        Row(
            "complex",
            other,
            "module",
            "real parameters",
            reason,
            "Make each complex one nn.Parameter(torch.view_as_real(z)), and call torch.view_as_complex in forward.",
        )
        for other, reason in (
            ("hypergradient", "{algorithm} computes with real numbers"),
            ("optimizer_roles", "steps with hyperparameters that a problem gives are of real numbers"),
        )
    ),
    Row(
        "tasks",
        "sparse_layers",
        "module",
        "layers with dense gradients",
        "torch.vmap has no sparse ones",
        "Leave out sparse=True, and SparseAdam.",
    ),
    Row("line_search", "fp16", "precision", "fp32 or bf16", "a line search compares losses, and fp16 scales them"),
    Row(
        "line_search",
        "reads",
        "optimizer",
        "an optimizer that steps along the gradient",
        "it compares values of the loss, but the gradient passes through the solution of '{read}', which stays as it "
        "is where those values are taken",
        "Write optimizer: adam.",
    ),
    Row(
        "impure",
        "unrolled",
        "optimizer",
        "SGD, Adam or AdamW of torch.optim",
        "{algorithm} takes its steps again, as pure functions",
        "Choose one of them, or an implicit hypergradient for '{name}' (hypergradient=cg).",
    ),
    Row(
        "impure",
        "optimizer_roles",
        "optimizer",
        "SGD, Adam or AdamW of torch.optim",
        "a problem gives its hyperparameters, through which gradients pass",
    ),
    Row("optimizer_roles", "scheduler", "scheduler", "null", "a problem sets hyperparameters"),
    Row("reset_to", "roll_back", "roll_back", "false", "reset_to begins each unroll anew"),
    Row("reset_to", "warmup", "warmup_steps", "0", "reset_to undoes them"),
    *(
        Row(
            "persistent",
            key,
            key,
            expected,
            "persistent rollouts go on where the last ones ended, while the problem's own steps begin elsewhere",
            f"Set persistent=false, or leave {key} out.",
        )
        for key, expected in (("reset_to", "null"), ("roll_back", "false"))
    ),
    *(
        Row("fp16", position, "precision", "bf16 or fp32", reason, "Write problems.{name}.precision: bf16.")
        for position, reason in (
            ("unrolled", "{algorithm} differentiates its steps, of which an overflow skips some"),
            ("nested", "its pullback contains another one, where no loss scale keeps from underflow"),
            ("differentiated", "its pullback is differentiated, where no loss scale keeps from underflow"),
        )
    ),
    Row(
        "differences",
        "differentiated",
        "hypergradient.product",
        "reverse",
        _ABOVE,
        "Write +hypergradient@problems.{name}.hypergradient=cg, or set curvature: partial (or, if '{name}' shapes none "
        "of those that it reads, product: finite_difference) on the problem above.",
    ),
    Row(
        "approximate",
        "differentiated",
        "hypergradient.solver",
        "a solver whose derivative is known: ConjugateGradient, NormalEquationConjugateGradient, Exact, Neumann, "
        "FixedPoint or Identity",
        _ABOVE,
        _USE_CG,
    ),
    *(
        Row(algorithm, position, "hypergradient", "an implicit hypergradient", reason, _USE_CG)
        for algorithm, position, reason in (
            (
                "penalty",
                "nested",
                "'{name}' both shapes and reads a lower problem, whose solution at the second iterate is not known",
            ),
            ("penalty", "differentiated", _ABOVE),
            ("saba", "differentiated", _ABOVE),
            (
                "evolution",
                "nested",
                "'{name}' both shapes and reads a lower problem, so each of its steps contains that one's solution at "
                "the time",
            ),
            ("evolution", "differentiated", _ABOVE),
        )
    ),
    *(
        Row(each, use, "", "", reason, is_refused=False)
        for each, uses, reason in (
            ("ranks", _BOTH, "its gradient is a mean over ranks"),
            ("parallel", _BOTH, "its training is layer-parallel"),
            ("fp16", _BOTH, "in fp16 a step decides by its gradient whether it is taken"),
            ("impure", ("trace",), "its optimizer is none of SGD, Adam and AdamW"),
            ("line_search", ("fuse",), "its optimizer evaluates the loss itself"),
            ("optimizer_roles", ("trace",), "another problem gives hyperparameters of its optimizer"),
            ("reset_to", ("trace",), "each of its unrolls begins anew (reset_to)"),
            ("roll_back", ("trace",), "its steps are a look-ahead (roll_back)"),
            ("directing", _BOTH, "the hypergradient of '{solution}' makes the steps of '{solution}'"),
            ("graphs", _BOTH, "the hypergradient of '{solution}' keeps the graphs of the steps of '{solution}'"),
            ("compile", _BOTH, "the module of '{name}' is compiled by itself"),
            ("complex", _BOTH, "the parameters of '{name}' are complex"),
            ("sparse_layers", _BOTH, "the gradient of '{name}' is sparse"),
            ("shard", _BOTH, "the parameters of '{name}' are divided among ranks"),
            ("sparse", _BOTH, "the steps of '{solution}' are taken again from their gradients (trajectory)"),
            ("forward", _BOTH, "the hypergradient of '{solution}' takes tangents, which a trace does not record"),
            ("blocks", _BOTH, "a trace takes equal evaluations once, and would keep what remat of '{name}' drops"),
            (
                "remembering",
                _BOTH,
                "the hypergradient of '{solution}' keeps something from one use to the next, or decides by values",
            ),
        )
        for use in uses
    ),
)
