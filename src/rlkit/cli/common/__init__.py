"""What commands share: arguments, options, output, signals, exit codes."""
