"""The two ways a command can end badly. The exit code travels with the exception."""


class CompressnasError(Exception):
    """A failure whose message is one line that a user can act on."""

    exit_code = 1


class RunFailed(CompressnasError):
    """The run itself failed: the proof, the verification of the ONNX file, the training."""

    exit_code = 1


class InputError(CompressnasError):
    """What was given cannot be used: recipe, data, checkpoint, output folder, full disk."""

    exit_code = 2
