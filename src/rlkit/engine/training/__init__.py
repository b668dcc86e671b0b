"""Training in the engine: packed sequences, losses, gradients, optimiser steps."""
