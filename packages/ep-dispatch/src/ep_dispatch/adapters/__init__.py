"""Our implementations inside other systems. Each module is imported only when it is asked for."""
