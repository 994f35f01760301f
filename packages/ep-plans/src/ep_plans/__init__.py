"""What is sharded how: plans and parallel styles."""
