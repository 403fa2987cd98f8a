"""Records made into estimates with standard errors, tables and figures. Opens no weights."""
