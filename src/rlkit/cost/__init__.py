"""Usage, prices, budgets and estimates."""
