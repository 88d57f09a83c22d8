"""What every room shares: origins, registries, dtypes, operator tables, the printed form."""
