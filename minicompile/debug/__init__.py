"""Looking into compilations: logs, dump folder, progress, and which stage loses accuracy."""
