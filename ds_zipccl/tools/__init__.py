"""What the commands of ``cli`` and the measurements of ``benchmarks`` share: tables and files, slow networks, synthetic data, plots."""


class ToolError(RuntimeError):
    """A command cannot do its task; the user sees the message without a traceback."""
