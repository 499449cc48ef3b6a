"""The everyday words that sentences are made of, and the sentences that are only ever listened to."""

PEOPLE = """man woman boy girl child teacher doctor farmer driver friend brother sister mother father neighbour student
writer singer soldier captain king queen baker painter sailor nurse judge lawyer worker engineer uncle aunt cousin
stranger guest visitor artist cook hunter waiter pilot police officer president people children men women everyone
somebody nobody""".split()
ANIMALS = "dog cat horse bird fish cow sheep pig mouse lion bear wolf rabbit chicken duck monkey snake fox goat bee".split()
THINGS = """book letter table chair window door house car train boat ship plane road street bridge river lake sea ocean
mountain hill forest tree flower garden field farm town city village country school church hospital hotel shop market
station airport office kitchen room bed lamp clock watch phone computer radio picture paper pen box bag coat hat shoe
shirt dress ring bottle glass cup plate knife fork spoon bread butter cheese milk water coffee tea wine beer apple
orange banana potato tomato egg meat rice soup cake sugar salt fire stone sand wind rain snow ice sun moon star sky
cloud storm light shadow wall floor roof corner gate path island beach ticket key map machine engine wheel bicycle
bus truck song story movie game ball question answer word name number line page sentence language voice music idea
plan problem reason price money dollar coin gift party meeting dinner breakfast lunch morning evening afternoon night
week month year summer winter spring autumn weather news report law war peace power health heart hand head face eye
ear mouth nose arm leg foot finger hair body blood""".split()
PLACES = """in the garden|in the kitchen|at the station|on the table|near the river|behind the house|under the bridge
on the hill|in the city|by the sea|across the street|at school|at home|in the forest|on the beach|next to the window
in the morning|in the evening|at night|after dinner|before lunch|on Monday|on Friday|last week|next year|every day
this summer|in the middle of the night|for a long time|at the end of the road|from time to time|around the world
without a word|with a smile|over the mountains|through the open door|along the path|between the trees""".replace("\n", "|").split("|")
ADJECTIVES = """old young new big small little long short tall high low good bad happy sad angry quiet loud fast slow
strong weak rich poor hot cold warm cool dry wet clean dirty full empty dark bright black white red green blue yellow
brown grey heavy light hard soft easy difficult simple strange beautiful ugly kind funny famous important dangerous
safe busy tired hungry thirsty wonderful terrible perfect broken open closed early late cheap expensive real false
deep wide narrow round sweet bitter fresh clever brave lazy lucky modern ancient common special several many""".split()
PAST = """saw found took gave made left bought sold kept lost broke built carried watched painted cleaned opened closed
followed helped loved liked wanted needed remembered forgot heard touched pushed pulled dropped caught threw brought
sent showed told asked called met visited knew understood drew wrote read counted moved changed started finished
washed cut cooked ate drank hid held chose stole burned fixed described""".split()
PRESENT = """see find take give make leave buy sell keep lose break build carry watch paint clean open close follow help
love like want need remember forget hear touch push pull drop catch throw bring send show tell ask call meet visit know
understand draw write read count move change start finish wash cut cook eat drink hide hold choose fix describe
believe think hope imagine explain discover enjoy hate trust prefer""".split()
WENT = """walked ran went came drove flew travelled returned arrived waited slept stood sat lived worked played laughed
cried smiled danced sang talked listened jumped climbed fell stopped stayed swam shouted disappeared""".split()
ADVERBS = """slowly quickly quietly loudly suddenly finally always never often sometimes usually again already soon
together alone carefully easily happily sadly early late today tomorrow yesterday here there outside inside away
almost certainly perhaps really only still just""".split()
NAMES = """Anna Peter John Mary Paul Emma David Sarah Michael Lisa Tom Alice James Laura Robert Julia George Helen
Martin Kate Daniel Susan Frank Nancy Henry Lucy Mark Rachel Simon Jane London Paris Berlin Rome Tokyo America Europe
England Germany France China Africa""".split()
NUMBERS = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million first second third
half""".split()
SMALL = """the a an and but or if because when while although so that this these those my your his her our their its I
you he she it we they me him them us who what where why how which is are was were be been will would can could should
must may might do does did not have has had to of in on at by with from for about into over after before between
under up down out off than as very more most much some any no all both each other another every such too well now then
once also even there's it's don't can't won't I'm you're he's she's we're they're isn't didn't""".split()
COMPUTING = """model speech voice server sound text audio frame codec token stream request memory program network signal
system test code data file machine learning training graph engine""".split()

PHRASES = """Hello world.|Hello, how are you today?|Good morning.|Good evening, everyone.|Thank you very much.|You are welcome.
Yes, please.|No, thank you.|I am sorry.|Excuse me, please.|See you tomorrow.|Have a nice day.|How are you?|I am fine.
What is your name?|My name is Anna.|Where are you from?|Nice to meet you.|Good night and sleep well.|Welcome home.
The quick brown fox jumps over the lazy dog.|One, two, three, four, five.|Testing, one, two, three.|Hello.|Goodbye.
This is a test.|This is a small voice.|I can speak.|The server is ready.|Please wait a moment.|What time is it?
Happy birthday to you.|Can you hear me?|It was nice to talk to you.|Let us begin.|That is all for today.""".replace("\n", "|").split("|")

# Written by hand, in nobody's training data: no template makes them.
HELD_OUT = """The horse and the sheep ate the green grass on the hill.
My brother wants to travel around the world next year.
She opened the window because the room was too hot.
We had bread and cheese for breakfast this morning.
The old man told the children a story about the sea.
I cannot remember where I put my keys.
There is a small village at the end of the road.
The doctor said that I should drink more water.
He bought a red bicycle for his daughter.
The train to the city leaves in ten minutes.
They were walking slowly along the river.
Please close the door when you leave the house.
The weather will be cold and wet tomorrow.
Nobody knew the answer to the question.
My mother works in a hospital near the station.
The cat is sleeping under the kitchen table.
It was a dark night and the wind was strong.
Would you like another cup of coffee?
The teacher asked us to write a long letter.
A black bird was sitting on the roof of the church.
You should never forget your friends.
The price of milk is higher than last week.
I heard a strange voice in the next room.
The captain brought the ship safely to the island.
We waited for an hour but nobody came.
Her father was a famous painter in Paris.
The snow on the mountain was white and soft.
What did you do with all that money?
The farmer has six cows and twenty chickens.
This is the most beautiful garden in the country.
He lost his hat in the storm yesterday.
The children are playing with a ball in the street.
I think the movie was better than the book.
She sings every evening in a small hotel.
The boat moved quietly over the dark water.
Do not touch the plate because it is hot.
After dinner we listened to music and talked.
The king gave the soldier a ring of gold.
They live in a big house with a green door.
Everything was quiet until the phone began to ring.""".split("\n")
