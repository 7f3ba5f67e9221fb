"""How ranks find each other, agree, exchange a round's messages, and end together when one fails."""
