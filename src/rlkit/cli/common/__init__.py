"""Parts that commands share: arguments, options, output, signals, exit codes."""
