"""Sentences in pairs that mean the same, to see whether a sentence encoder still finds each one's partner."""

PAIRS = (
    ("A man is playing a guitar on stage.", "A musician performs with his guitar before an audience."),
    ("The stock market fell sharply today.", "Share prices dropped a lot on the exchange this afternoon."),
    ("She bakes bread every Sunday morning.", "Each weekend the woman makes fresh loaves in her oven."),
    ("The cat is sleeping on the sofa.", "A kitten naps on the couch."),
    ("Doctors found a new treatment for the disease.", "Medical researchers discovered a cure for the illness."),
    ("The train to London was two hours late.", "There was a long delay on the railway to the English capital."),
    ("Our team won the football match.", "The club was victorious in yesterday's soccer game."),
    ("It has been raining heavily all week.", "The weather was very wet for seven days."),
    ("The teacher explained the equation to her pupils.", "In class the mathematics formula was made clear to the students."),
    ("He repaired the broken engine of his car.", "The mechanic fixed the motor of the vehicle."),
    ("The king was murdered by his own brother.", "A monarch died at the hands of his sibling."),
    ("Astronauts landed on the Moon in 1969.", "Humans first walked on the lunar surface in the sixties."),
)  # fmt: skip
