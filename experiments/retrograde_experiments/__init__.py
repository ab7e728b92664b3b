"""The paper's figures and tables as running software: one file each, config → run → metrics → figure."""
